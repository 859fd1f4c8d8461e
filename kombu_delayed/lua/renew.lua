-- renew: make a consumer's lease last longer, and name others whose lease has ended.
-- Twice is safe.
local consumers  = KEYS[1]            -- ZSET consumer -> end of its lease
local granted_by = KEYS[2]            -- STRING run id of the server by whose clock they end
local now        = ARGV[1]
local consumer   = ARGV[2]
local lease_ms   = tonumber(ARGV[3])
-- include: clock
-- returns {1, dead consumer, …}, or {0} where the lease was lost
if (redis.call('ZSCORE', consumers, consumer) or '0') == '0' then return {0} end
redis.call('ZREM', consumers, '')    -- a full server lets a script write that has freed memory first
redis.call('ZADD', consumers, now_ms + lease_ms, consumer)

-- A server that has just started, or was a replica until now, has kept all from renewing, and its clock may
-- be another: here each lease begins anew, once. One that lasts longer may be another consumer's long one.
local info = now == '' and redis.pcall('INFO', 'server')
local run_id = type(info) == 'string' and info:match('run_id:(%w+)')
if run_id then
  local known = redis.call('GET', granted_by)
  if known ~= run_id then redis.call('SET', granted_by, run_id) end
  if known and known ~= run_id then
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', consumers, '(0', '+inf')) do
      redis.call('ZADD', consumers, 'GT', now_ms + lease_ms, other)
    end
  end
end

-- They have an expiry where their queue has one: it lasts while who has its messages does.
local left_ms = redis.call('PTTL', consumers)
if left_ms >= 0 then
  local queue = consumers:sub(1, -10)
  for _, name in ipairs({'consumers', 'granted-by', 'expires', 'unacked:' .. consumer, 'gate:slots', 'gate:slots:' .. consumer}) do
    redis.call('PEXPIRE', queue .. name, math.max(left_ms, 10 * lease_ms))
  end
end
return {1, unpack(redis.call('ZRANGEBYSCORE', consumers, '-inf', now_ms, 'LIMIT', 0, 100))}
