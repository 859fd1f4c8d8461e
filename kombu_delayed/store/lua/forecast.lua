-- forecast: count delayed messages by due time, from the partition index and without reading them.
-- keys: partitions delayed
-- arguments: start:number limit:number edges...
--   start: rank of the first partition to look at
--   limit: look at so many
--   edges: ms, ascending: the counts are of what is due from one to the next
-- include: forecast
-- returns {1 if there are more partitions, messages before the first edge, …, from the last edge on}
local found = redis.call('ZRANGE', partitions, start, start + limit, 'WITHSCORES')
return {#found / 2 > limit and 1 or 0, unpack(count_by_due(found, edges, limit))}
