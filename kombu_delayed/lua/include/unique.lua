-- unique: which delayed message has a unique key. Messages leave the backlog without a look at their keys.
-- needs: unique unique_due now
local KEPT_AFTER_MS = 30 * 86400000

local function remember(key, member, at_ms)
  redis.call('HSET', unique, key, member)
  redis.call('ZADD', unique_due, at_ms, key)
  local last_ms = redis.call('ZRANGE', unique_due, -1, -1, 'WITHSCORES')[2]
  local in_ms = string.format('%.0f', math.max(last_ms - now_ms, 0) + KEPT_AFTER_MS)
  redis.call('PEXPIRE', unique, in_ms)
  redis.call('PEXPIRE', unique_due, in_ms)
end
