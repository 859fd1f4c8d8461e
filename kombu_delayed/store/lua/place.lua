-- place: take one of a bounded number of places, for a time.
-- Twice is safe: a holder has one place.
-- keys: places
-- arguments: now holder limit:number kept_ms:number
--   places: ZSET holder -> when its place is free again
-- include: clock
-- returns 1, or 0 where all are taken; O(log n)
redis.call('ZREMRANGEBYSCORE', places, '-inf', now_ms)
if not redis.call('ZSCORE', places, holder) and redis.call('ZCARD', places) >= limit then return 0 end
redis.call('ZADD', places, now_ms + kept_ms, holder)
redis.call('PEXPIRE', places, kept_ms)
return 1
