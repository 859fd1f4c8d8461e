-- dictionary: whether compressed messages may come into a queue. After buckets.
-- needs: dictionaries dictionary messages
-- Only where the queue is large: then no consumer of version 0.1.0 has a lease. Its dictionaries go when it has been empty
-- for long (`forget_dictionaries`), and that time begins anew.
local function takes_compressed()
  local since, idle = unpack(redis.call('HMGET', dictionaries, 'since:' .. dictionary, 'idle'))
  if not since or layout_of(messages).last == 0 then return false end
  if idle then redis.call('HDEL', dictionaries, 'idle') end
  return true
end
