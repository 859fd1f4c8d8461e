-- expect: schedule a message that waits for an answer until its timeout; where the answer has come already, it is
-- ready at once and has it. Twice is safe: an id expects a name once, also where that has ended since.
local partitions         = KEYS[1]             -- ZSET partition -> lower bound of its due times
local delayed            = KEYS[2]             -- what the partitions' keys begin with
local messages           = KEYS[3]             -- HASH id -> priority step + due_ms + message
local duplicates         = KEYS[4]             -- HASH id -> how many messages share it
local wake               = KEYS[5]             -- ZSET token -> when to claim
local unique             = KEYS[6]             -- HASH key -> id of the delayed message with it
local unique_due         = KEYS[7]             -- ZSET key -> when that one was due last
local expectations       = KEYS[8]             -- HASH name -> JSON: what is expected, or how that has ended
local expectations_until = KEYS[9]             -- ZSET name -> when that is forgotten
local answers            = KEYS[10]            -- HASH name -> JSON: an answer whose question has yet to come
local answers_until      = KEYS[11]            -- ZSET name -> when that is forgotten
local events             = KEYS[12]            -- STREAM of lifecycle events
local ready              = {unpack(KEYS, 13)}  -- LIST per priority step
local now                = ARGV[1]
local partition_size     = tonumber(ARGV[2])
local steps              = ARGV[3]
local event_limit        = tonumber(ARGV[4])   -- about so many are kept; 0: none
local name               = ARGV[5]
local id                 = ARGV[6]
local record             = ARGV[7]             -- priority step + message, with the header delayed_answer null
local timeout_ms         = tonumber(ARGV[8])
local kept_ms            = tonumber(ARGV[9])   -- how long it is known afterwards how it ended
-- include: clock waiting ready backlog events unique notes awaited
-- returns {'open', 'answered', 'failed', 'timed_out' or 'cancelled'; or 'refused', as another one is open, id of
--   the one that counts}; O(log n)
clear_past(expectations, expectations_until)
clear_past(answers, answers_until)
local note = facts_of(expectations, name)
local open = open_message(name, note)
if open then return {id_of(open) == id and 'open' or 'refused', id_of(open)} end
if note and note.id == id then return {note.state == 'open' and 'timed_out' or note.state, id} end

local early = facts_of(answers, name)
if early then
  redis.call('LPUSH', list_for(record:sub(1, 1)), with_answer(record:sub(2), early.answer))
  forget(answers, answers_until, name)
  note_settled(name, id, early.state, early.answer_id, kept_ms)
  announce_ready()
  return {early.state, id}
end

local before, due_ms = earliest(), now_ms + timeout_ms
local member = put(id, due_ms, record, partition_size, true)
announce_due(due_ms, before)
remember(name, member, due_ms)
note = {state = 'open', id = id, at_ms = now_ms, due_ms = due_ms}
keep_until(expectations, expectations_until, name, note, due_ms + kept_ms)
tell('scheduled', id, record, due_ms)
return {'open', id}
