-- forecast: count delayed messages by due time, from the partition index, without reading them.
-- keys: partitions delayed
-- arguments: start:number limit:number edges...
--   start: rank of the first partition to count
--   limit: how many partitions to count
--   edges: ms, ascending; the counts are of messages due between consecutive edges
-- include: forecast
-- returns {1 if there are more partitions, messages before the first edge, …, from the last edge on}
local found = redis.call('ZRANGE', partitions, start, start + limit, 'WITHSCORES')
return {#found / 2 > limit and 1 or 0, unpack(count_by_due(found, edges, limit))}
