-- reclaim: put messages of a consumer whose lease has ended back to the heads of their ready lists.
-- Twice is safe; call it until nothing is left.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed    = KEYS[2]            -- what the partitions' keys begin with
local messages   = KEYS[3]            -- HASH id -> priority step + message
local duplicates = KEYS[4]            -- HASH id -> how many messages share it
local wake       = KEYS[5]            -- ZSET token -> when to claim
local armed      = KEYS[6]            -- STRING "due_ms consumer": who has promised to claim then
local consumers  = KEYS[7]            -- ZSET consumer -> end of its lease
local unacked    = KEYS[8]            -- HASH tag -> priority step + message, of the dead consumer
local ready      = {unpack(KEYS, 9)}  -- LIST per priority step
local now        = ARGV[1]
local consumer   = ARGV[2]            -- the dead one
local steps      = ARGV[3]
local limit      = tonumber(ARGV[4])
-- include: clock ready unacked backlog announce
-- returns {messages put back, messages it still holds}; {0, 0} where the lease lasts
local lease_end_ms = redis.call('ZSCORE', consumers, consumer)
if lease_end_ms and tonumber(lease_end_ms) > now_ms then return {0, 0} end
local held = redis.call('HLEN', unacked)
local left = give_back_some(unacked, limit, 1)
if left > 0 then return {held - left, left} end
if (redis.call('GET', armed) or ''):match(' (.*)$') == consumer then redis.call('DEL', armed) end
redis.call('ZREM', consumers, consumer)
announce_all()
return {held, 0}
