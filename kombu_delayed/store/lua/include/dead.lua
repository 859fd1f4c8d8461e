-- dead: the dead letters, limited by count and by age. They have no expiry, because a server may evict keys that have
-- one. Only the dead letters of a queue with an expiry expire.
-- needs: dead dead_messages dead_reasons dead_limit dead_age_ms now
local function forget_dead(members)
  if #members == 0 then return 0 end
  redis.call('ZREM', dead, unpack(members))
  bucket_drop_all(dead_reasons, members)
  return bucket_drop_all(dead_messages, members)
end

-- The place of a new letter: behind the others, even if the clock was set back by up to a day.
local function place_of_new()
  local last_ms = tonumber(redis.call('ZRANGE', dead, -1, -1, 'WITHSCORES')[2] or 0)
  return last_ms > now_ms and last_ms < now_ms + 86400000 and last_ms + 1 or now_ms
end

local function entomb(id, record, consumer, deliveries, reason, failures)
  local member, n = id, math.max(redis.call('ZCARD', dead), 1)  -- most likely free
  while not bucket_add(dead_messages, member, record) do
    n = n + 1
    member = id .. '\31' .. n
  end
  local note = {reason = reason, consumer = consumer, at_ms = now_ms, deliveries = deliveries, failures = failures}
  local text = cjson.encode(note)
  if not bucket_add(dead_reasons, member, text) then bucket_set(dead_reasons, member, text) end
  redis.call('ZADD', dead, place_of_new(), member)
  if redis.call('EXISTS', dead:sub(1, -5) .. 'expires') == 1 then
    redis.call('PEXPIRE', dead, dead_age_ms)
    for _, key in ipairs({dead_messages, dead_reasons}) do bucket_expire(key, member, dead_age_ms) end
  elseif redis.call('PERSIST', dead) == 1 then
    for _, key in ipairs({dead_messages, dead_reasons}) do bucket_persist(key) end
  end
  forget_dead(redis.call('ZRANGEBYSCORE', dead, '-inf', now_ms - dead_age_ms, 'LIMIT', 0, 1000))
  local excess = redis.call('ZCARD', dead) - dead_limit
  if excess > 0 then forget_dead(redis.call('ZRANGE', dead, 0, math.min(excess, 1000) - 1)) end
  return member
end
