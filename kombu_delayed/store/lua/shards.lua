-- shards: record the highest number of shards that a queue ever had: shards that are no longer used may have messages.
-- Idempotent.
-- keys: counts
-- arguments: queue count:number
--   counts: HASH queue -> its highest number of shards
--   count: its number of shards now
-- returns the highest number; O(1)
local most = tonumber(redis.call('HGET', counts, queue)) or 1
if count <= most then return most end
redis.call('HSET', counts, queue, count)
return count
