-- drop: forget a message that a policy does not let run, and tell why.
-- Twice is safe for what is held: what is not held any more stays as it is.
local unacked     = KEYS[1]            -- HASH tag -> priority step + message, of this consumer
local events      = KEYS[2]            -- STREAM of lifecycle events
local consumer    = ARGV[1]
local event_limit = tonumber(ARGV[2])  -- about so many are kept; 0: none
local reason      = ARGV[3]
local tag         = ARGV[4]
local record      = ARGV[5]            -- of a message that is not held (or empty: the one that is)
-- include: events
-- returns 1 if there was one; O(1)
if record == '' then record = redis.call('HGET', unacked, tag) end
if not record then return 0 end
redis.call('HDEL', unacked, tag)
tell_of_held('dropped', record, consumer, nil, nil, reason)
return 1
