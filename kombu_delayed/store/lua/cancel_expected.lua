-- cancel_expected: expect nothing any more: drop the message that waits for an answer. One that comes is late.
-- Twice is safe.
local partitions         = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed            = KEYS[2]            -- what the partitions' keys begin with
local messages           = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates         = KEYS[4]            -- HASH id -> how many messages share it
local unique             = KEYS[5]            -- HASH key -> id of the delayed message with it
local unique_due         = KEYS[6]            -- ZSET key -> when that one was due last
local expectations       = KEYS[7]            -- HASH name -> JSON: what is expected, or how that has ended
local expectations_until = KEYS[8]            -- ZSET name -> when that is forgotten
local events             = KEYS[9]            -- STREAM of lifecycle events
local now                = ARGV[1]
local event_limit        = tonumber(ARGV[2])   -- about so many are kept; 0: none
local name               = ARGV[3]
local kept_ms            = tonumber(ARGV[4])   -- how long it is known afterwards how it ended
-- include: clock backlog events notes awaited
-- returns {member, priority step + due_ms + message}, or {} where nothing is expected; O(log n)
local member, kept = open_message(name, facts_of(expectations, name))
if not member then return {} end
local _, due_ms = parts_of(kept)
take_open(name, member)
note_settled(name, id_of(member), 'cancelled', nil, kept_ms)
tell('cancelled', member, kept, due_ms)
return {member, kept}
