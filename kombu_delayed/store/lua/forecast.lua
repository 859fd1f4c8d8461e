-- forecast: count delayed messages by due time, from the partition index and without reading them.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed    = KEYS[2]            -- what the partitions' keys begin with
local start      = tonumber(ARGV[1])  -- rank of the first partition to look at
local limit      = tonumber(ARGV[2])  -- look at so many
local edges      = {unpack(ARGV, 3)}  -- ms, ascending: the counts are of what is due from one to the next
-- include: forecast
-- returns {1 if there are more partitions, messages before the first edge, …, from the last edge on}
local found = redis.call('ZRANGE', partitions, start, start + limit, 'WITHSCORES')
return {#found / 2 > limit and 1 or 0, unpack(count_by_due(found, edges, limit))}
