-- shards: over how many shards a queue is spread, or was when that were more: those may not be empty yet.
-- Twice is safe.
-- keys: counts
-- arguments: queue count:number
--   counts: HASH queue -> the most shards that it was spread over
--   count: how many it is spread over now
-- returns the most; O(1)
local most = tonumber(redis.call('HGET', counts, queue)) or 1
if count <= most then return most end
redis.call('HSET', counts, queue, count)
return count
