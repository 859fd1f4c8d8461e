-- respond: give the message that waits for it its answer, which makes it ready; or keep an answer whose question has
-- yet to come. Twice is safe: the same answer is told the same again.
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
local steps              = ARGV[2]
local event_limit        = tonumber(ARGV[3])   -- about so many are kept; 0: none
local name               = ARGV[4]
local answer_id          = ARGV[5]
local state              = ARGV[6]             -- answered or failed
local answer             = ARGV[7]             -- a string of JSON
local kept_ms            = tonumber(ARGV[8])   -- how long it is known afterwards how it ended
local early_ms           = tonumber(ARGV[9])   -- how long an early answer is kept; 0: not at all
local early_limit        = tonumber(ARGV[10])  -- how many are
-- include: clock waiting ready backlog events notes awaited expiry
-- returns {'accepted', 'early', 'late', 'unknown' or 'full', as it is not kept, id of the message or ''}; O(log n)
clear_past(expectations, expectations_until)
clear_past(answers, answers_until)
local note = facts_of(expectations, name)
if note and note.answer_id == answer_id then return {'accepted', note.id} end

local member, kept = open_message(name, note)
if member then
  local step, _, message = parts_of(kept)
  take_open(name, member)
  tell('rescheduled', member, kept, now_ms, nil, nil, nil, state)
  redis.call('LPUSH', list_for(step), with_answer(message, answer))
  note_settled(name, id_of(member), state, answer_id, kept_ms)
  announce_ready()
  expire_as_noted()
  return {'accepted', id_of(member)}
end
if note then return {'late', note.id} end  -- it has ended, or a consumer has it and so its time is over

local early = facts_of(answers, name)
if early then return {early.answer_id == answer_id and 'early' or 'late', ''} end
if early_ms == 0 then return {'unknown', ''} end
if redis.call('HLEN', answers) >= early_limit then return {'full', ''} end
early = {state = state, answer_id = answer_id, answer = answer, at_ms = now_ms}
keep_until(answers, answers_until, name, early, now_ms + early_ms)
return {'early', ''}
