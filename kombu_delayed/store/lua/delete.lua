-- delete: remove what is left of a queue that has been purged, unless something has come since.
-- Twice is safe.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local wake       = KEYS[2]            -- ZSET token -> when to claim
local armed      = KEYS[3]            -- STRING "due_ms consumer": who has promised to claim then
local events     = KEYS[4]            -- STREAM of lifecycle events
local waiting    = KEYS[5]            -- ZSET id -> due_ms, of what waits at a gate
local ready      = {unpack(KEYS, 6)}  -- LIST per priority step
-- returns how many keys are gone; unacked messages stay their consumers', dead letters stay
if redis.call('EXISTS', partitions, waiting, unpack(ready)) > 0 then return 0 end
return redis.call('DEL', wake, armed, events, wake:sub(1, -5) .. 'expires')
