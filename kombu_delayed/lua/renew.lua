-- renew: make a consumer's lease last longer, and name others whose lease has ended.
-- Twice is safe.
local consumers = KEYS[1]            -- ZSET consumer -> end of its lease
local now       = ARGV[1]
local consumer  = ARGV[2]
local lease_ms  = tonumber(ARGV[3])
local grace_ms  = tonumber(ARGV[4])  -- a server that has just started has kept others from renewing
-- include: clock
-- returns {1, dead consumer, …}, or {0} where the lease was lost
if (redis.call('ZSCORE', consumers, consumer) or '0') == '0' then return {0} end
redis.call('ZREM', consumers, '')    -- a full server lets a script write that has freed memory first
redis.call('ZADD', consumers, now_ms + lease_ms, consumer)
local dead = redis.call('ZRANGEBYSCORE', consumers, '-inf', now_ms, 'LIMIT', 0, 100)
if #dead == 0 then return {1} end
local info = now == '' and redis.pcall('INFO', 'server')
local up_seconds = type(info) == 'string' and tonumber(info:match('uptime_in_seconds:(%d+)'))
if up_seconds and up_seconds * 1000 < grace_ms then return {1} end
return {1, unpack(dead)}
