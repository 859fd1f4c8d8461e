-- forget: drop dead letters for good.
-- Idempotent.
-- keys: dead dead_messages dead_reasons absent
-- arguments: ids...
-- include: buckets
-- returns how many there were; O(log n) a letter
redis.call('ZREM', dead, unpack(ids))
bucket_drop_all(dead_reasons, ids)
return bucket_drop_all(dead_messages, ids)
