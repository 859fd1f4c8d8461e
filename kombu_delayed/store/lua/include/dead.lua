-- dead: the dead letters, bounded by count and by age. They have no expiry, as a server may evict what has one; but
-- those of a queue that has an expiry itself do.
-- needs: dead dead_messages dead_reasons dead_limit dead_age_ms now
local function forget_dead(members)
  if #members == 0 then return 0 end
  redis.call('ZREM', dead, unpack(members))
  redis.call('HDEL', dead_reasons, unpack(members))
  return redis.call('HDEL', dead_messages, unpack(members))
end

local function entomb(id, record, consumer, deliveries, reason, failures)
  local member, n = id, math.max(redis.call('HLEN', dead_messages), 1)  -- most likely free
  while redis.call('HSETNX', dead_messages, member, record) == 0 do
    n = n + 1
    member = id .. '\31' .. n
  end
  local note = {reason = reason, consumer = consumer, at_ms = now_ms, deliveries = deliveries, failures = failures}
  redis.call('HSET', dead_reasons, member, cjson.encode(note))
  redis.call('ZADD', dead, now_ms, member)
  local expires = redis.call('EXISTS', dead:sub(1, -5) .. 'expires') == 1
  for _, key in ipairs({dead, dead_messages, dead_reasons}) do
    if expires then redis.call('PEXPIRE', key, dead_age_ms) else redis.call('PERSIST', key) end
  end
  forget_dead(redis.call('ZRANGEBYSCORE', dead, '-inf', now_ms - dead_age_ms, 'LIMIT', 0, 1000))
  local excess = redis.call('ZCARD', dead) - dead_limit
  if excess > 0 then forget_dead(redis.call('ZRANGE', dead, 0, math.min(excess, 1000) - 1)) end
  return member
end
