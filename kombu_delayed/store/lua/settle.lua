-- settle: note how a message that waited for an answer has ended, before anything follows from that.
-- Twice is safe: the first end counts, and is told the same again.
local expectations       = KEYS[1]           -- HASH name -> JSON: what is expected, or how that has ended
local expectations_until = KEYS[2]           -- ZSET name -> when that is forgotten
local now                = ARGV[1]
local name               = ARGV[2]
local id                 = ARGV[3]
local state              = ARGV[4]           -- answered, failed or timed_out
local kept_ms            = tonumber(ARGV[5])  -- how long it is known afterwards how it ended
-- include: clock notes
-- returns 1, or 0 where it has ended otherwise: then this message is a copy; O(log n)
redis.call('ZREM', expectations_until, '')  -- a full server lets a script write that has freed memory first
local note = facts_of(expectations, name)
if not note or note.id ~= id then return 1 end
if note.state ~= 'open' then return note.state == state and 1 or 0 end
note_settled(name, id, state, nil, kept_ms)
return 1
