-- dead_page: read ids of dead letters in the order of their burials. It changes nothing.
-- keys: dead absent
-- arguments: from_ms after limit:number
--   from_ms: buried from then on …
--   after: … and, of those of that very time, behind = and an id (or empty)
--   limit: at most so many
-- include: start
-- returns {id, time of burial, …}; O(log n · log n + limit)
local start = start_in(dead)
return redis.call('ZRANGE', dead, start, start + limit - 1, 'WITHSCORES')
