-- keepers: the consumers that declare limits or turns for a queue. As long as one of them has a lease, nobody is handed
-- anything who does not. After expiry.
-- needs: consumers consumer
local function others_keep()
  local keepers = of_queue('gate:keepers')
  redis.call('ZREM', keepers, consumer)
  for _, name in ipairs(redis.call('ZRANGE', keepers, 0, -1)) do
    if (redis.call('ZSCORE', consumers, name) or '0') ~= '0' then return true end
    redis.call('ZREM', keepers, name)
  end
  return false
end

local function refused()
  redis.call('ZREM', wake, '>' .. consumer)
  return {now_ms, 0, 4, redis.call('ZCARD', consumers)}
end
