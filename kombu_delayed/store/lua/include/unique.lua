-- unique: which delayed message has a unique key. Messages leave the backlog without a look at their keys.
-- needs: unique unique_due

local function remember(key, member, at_ms)
  redis.call('HSET', unique, key, member)
  redis.call('ZADD', unique_due, at_ms, key)
  redis.call('PERSIST', unique)  -- older code has given them an expiry, and a server may evict what has one
  redis.call('PERSIST', unique_due)
end
