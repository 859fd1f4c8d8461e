-- shards: over how many shards a queue is spread, or was when that were more: those may not be empty yet.
-- Twice is safe.
local counts = KEYS[1]            -- HASH queue -> the most shards that it was spread over
local queue  = ARGV[1]
local count  = tonumber(ARGV[2])  -- how many it is spread over now
-- returns the most; O(1)
local most = tonumber(redis.call('HGET', counts, queue)) or 1
if count <= most then return most end
redis.call('HSET', counts, queue, count)
return count
