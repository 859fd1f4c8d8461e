-- renew: make a consumer's lease last longer, and name others whose lease has ended.
-- Twice is safe.
local consumers = KEYS[1]            -- ZSET consumer -> end of its lease
local now       = ARGV[1]
local consumer  = ARGV[2]
local lease_ms  = tonumber(ARGV[3])
-- include: clock
-- returns {1, dead consumer, …}, or {0} where the lease was lost
if not redis.call('ZSCORE', consumers, consumer) then return {0} end
redis.call('ZADD', consumers, now_ms + lease_ms, consumer)
return {1, unpack(redis.call('ZRANGEBYSCORE', consumers, '-inf', now_ms, 'LIMIT', 0, 100))}
