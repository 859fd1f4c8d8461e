-- dead_page: read ids of dead letters in the order of their burials. Read-only.
-- keys: dead absent
-- arguments: from_ms after limit:number
--   from_ms: buried from this time on …
--   after: … and, among those of exactly that time, after this id, given with = in front (or empty)
--   limit: how many ids at most
-- include: start
-- returns {id, time of burial, …}; O(log n · log n + limit)
local start = start_in(dead)
return redis.call('ZRANGE', dead, start, start + limit - 1, 'WITHSCORES')
