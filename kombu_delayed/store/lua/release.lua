-- release: put messages that a consumer holds back to their ready lists: behind what waits, in the order given, or to
-- the heads, in the order in which they were delivered.
-- Twice is safe: what is not held any more stays where it is.
local wake           = KEYS[1]            -- ZSET token -> when to claim
local unacked        = KEYS[2]            -- HASH tag -> priority step + message, of this consumer
local held           = KEYS[3]            -- ZSET tag -> tag, while they are given back
local dead           = KEYS[4]            -- ZSET id -> time of burial
local dead_messages  = KEYS[5]            -- HASH id -> priority step + message
local dead_reasons   = KEYS[6]            -- HASH id -> JSON: why, by whom
local events         = KEYS[7]            -- STREAM of lifecycle events
local ready          = {unpack(KEYS, 8)}  -- LIST per priority step
local now            = ARGV[1]
local consumer       = ARGV[2]
local steps          = ARGV[3]
local counted        = tonumber(ARGV[4])  -- 1: this was an attempt, 0: it never started
local behind         = ARGV[5]            -- 1: behind what waits, 0: to the heads
local max_deliveries = tonumber(ARGV[6])  -- 0: any number
local dead_limit     = tonumber(ARGV[7])
local dead_age_ms    = tonumber(ARGV[8])
local event_limit    = tonumber(ARGV[9])  -- about so many are kept; 0: none
local tags           = {unpack(ARGV, 10)}
-- include: clock waiting ready events unacked dead poison expiry
-- returns {how many, the dead letters that some became …}; O(log n) a message
redis.call('ZREM', wake, '')  -- a full server lets a script write that has freed memory first
local buries = counted > 0 and is_poison
local returned
if behind == '1' then
  returned = put_back('LPUSH', tags, counted, 'released', buries)
else
  returned = give_back(tags, counted, 'released', buries)
end
expire_as_noted()
return {returned, unpack(buried)}
