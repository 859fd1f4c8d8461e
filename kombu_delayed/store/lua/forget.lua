-- forget: drop dead letters for good.
-- Twice is safe.
-- keys: dead dead_messages dead_reasons
-- arguments: ids...
-- returns how many there were; O(log n) a letter
redis.call('ZREM', dead, unpack(ids))
redis.call('HDEL', dead_reasons, unpack(ids))
return redis.call('HDEL', dead_messages, unpack(ids))
