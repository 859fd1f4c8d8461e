-- dictionary: whether compressed messages may come into a queue. After buckets.
-- needs: dictionaries dictionary messages
-- Only where the queue is large: then no consumer of version 0.1.0 has a lease. Where its dictionaries were to expire, since
-- it was empty (`forget_dictionaries`), they stay now.
local function takes_compressed()
  if redis.call('HEXISTS', dictionaries, dictionary) == 0 or layout_of(messages).last == 0 then return false end
  redis.call('PERSIST', dictionaries)
  return true
end
