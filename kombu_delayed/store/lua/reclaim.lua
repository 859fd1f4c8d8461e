-- reclaim: put messages of a consumer whose lease has ended back to the heads of their ready lists.
-- Twice is safe; call it until nothing is left.
local partitions     = KEYS[1]             -- ZSET partition -> lower bound of its due times
local delayed        = KEYS[2]             -- what the partitions' keys begin with
local messages       = KEYS[3]             -- HASH id -> priority step + due_ms + message
local duplicates     = KEYS[4]             -- HASH id -> how many messages share it
local wake           = KEYS[5]             -- ZSET token -> when to claim
local armed          = KEYS[6]             -- STRING "due_ms consumer": who has promised to claim then
local consumers      = KEYS[7]             -- ZSET consumer -> end of its lease
local unacked        = KEYS[8]             -- HASH tag -> priority step + message, of the dead consumer
local held           = KEYS[9]             -- ZSET tag -> tag, while they are given back
local dead           = KEYS[10]            -- ZSET id -> time of burial
local dead_messages  = KEYS[11]            -- HASH id -> priority step + message
local dead_reasons   = KEYS[12]            -- HASH id -> JSON: why, by whom
local events         = KEYS[13]            -- STREAM of lifecycle events
local gate           = KEYS[14]            -- what the keys of the gate begin with
local ready          = {unpack(KEYS, 15)}  -- LIST per priority step
local now            = ARGV[1]
local consumer       = ARGV[2]             -- the dead one
local steps          = ARGV[3]
local limit          = tonumber(ARGV[4])
local max_deliveries = tonumber(ARGV[5])   -- 0: any number
local dead_limit     = tonumber(ARGV[6])
local dead_age_ms    = tonumber(ARGV[7])
local event_limit    = tonumber(ARGV[8])   -- about so many are kept; 0: none
local ended_ms       = ARGV[9]             -- the end of the lease that the caller found dead; empty: any that has passed
-- include: clock waiting ready events unacked backlog announce dead poison gate slots expiry
-- returns {messages put back or buried, messages it still holds, the dead letters that some became …};
--   {0, 0} where the lease lasts, or was renewed since
local lease_end_ms = tonumber(redis.call('ZSCORE', consumers, consumer) or 0)
if lease_end_ms > 0 and lease_end_ms ~= tonumber(ended_ms) and (ended_ms ~= '' or lease_end_ms > now_ms) then return {0, 0} end
redis.call('ZREM', wake, '', '>' .. consumer)  -- a full server lets a script write that has freed memory first
redis.call('ZADD', consumers, 0, consumer)  -- from here on it is dead, though it may wake up between two calls
local before = redis.call('HLEN', unacked)
if before > 0 then  -- it finds this should it wake up
  local note_ms = redis.call('PTTL', of_queue('expires'))
  redis.call('SET', of_queue('reclaimed:' .. consumer), 1, 'PX', note_ms > 0 and note_ms or 86400000)
end
local left = give_back_some(limit, 1, 'reclaimed', is_poison)
left = left + free_some(limit, {})
if left > 0 then return {before - redis.call('HLEN', unacked), left, unpack(buried)} end
if (redis.call('GET', armed) or ''):match(' (.*)$') == consumer then redis.call('DEL', armed) end
redis.call('ZREM', consumers, consumer)
announce_all()
expire_as_noted()
return {before, 0, unpack(buried)}
