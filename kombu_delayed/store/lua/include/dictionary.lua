-- dictionary: whether a queue accepts compressed messages. After buckets.
-- needs: dictionaries dictionary messages
-- Only a large queue does: no consumer of version 0.1.0 has a lease there. If its dictionaries were about to expire,
-- because it was empty (`forget_dictionaries`), they stay now.
local function takes_compressed()
  if redis.call('HEXISTS', dictionaries, dictionary) == 0 or layout_of(messages).last == 0 then return false end
  if redis.call('PTTL', dictionaries) >= 0 then
    redis.call('HINCRBY', dictionaries, 'count', 0)  -- changes nothing, but a full server refuses it, and so the messages
    redis.call('PERSIST', dictionaries)
  end
  return true
end
