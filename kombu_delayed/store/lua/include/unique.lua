-- unique: record which delayed message has a unique key. Messages that become due leave the backlog without releasing
-- their keys.
-- needs: unique unique_due

local function remember(key, member, at_ms)
  redis.call('HSET', unique, key, member)
  redis.call('ZADD', unique_due, at_ms, key)
  redis.call('PERSIST', unique)  -- older code set an expiry, and a server may evict keys that have one
  redis.call('PERSIST', unique_due)
end
