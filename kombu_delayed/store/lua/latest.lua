-- latest: record the latest due time seen for a key.
-- Idempotent.
-- keys: latest
-- arguments: now key due_ms:number
-- include: clock
-- returns that time as text; O(log n)
local KEPT_MS = 30 * 86400000
-- Older code set an expiry, and a server may evict keys that have one. A full server accepts the other writes after this.
redis.call('PERSIST', latest)
redis.call('ZADD', latest, 'GT', due_ms, key)
local found = redis.call('ZSCORE', latest, key)
redis.call('ZREMRANGEBYSCORE', latest, '-inf', now_ms - KEPT_MS)
return string.format('%.0f', found)
