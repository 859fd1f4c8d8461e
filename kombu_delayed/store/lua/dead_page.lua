-- dead_page: read ids of dead letters in the order of their burials. It changes nothing.
local dead    = KEYS[1]            -- ZSET id -> time of burial
local from_ms = ARGV[1]            -- buried from then on …
local after   = ARGV[2]            -- … and, of those of that very time, behind = and an id (or empty)
local limit   = tonumber(ARGV[3])  -- at most so many
-- include: start
-- returns {id, time of burial, …}; O(log n · log n + limit)
local start = start_in(dead)
return redis.call('ZRANGE', dead, start, start + limit - 1, 'WITHSCORES')
