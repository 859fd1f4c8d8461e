-- delete: remove what is left of a queue that has been purged.
-- Twice is safe.
local wake  = KEYS[1]  -- ZSET token -> when to claim
local armed = KEYS[2]  -- STRING "due_ms consumer": who has promised to claim then
-- returns how many keys are gone; unacked messages stay their consumers', dead letters stay
return redis.call('DEL', wake, armed)
