-- consumers: the consumers of a queue, and the time left on their leases.
-- keys: consumers
-- arguments: now
-- include: clock
-- returns {consumer, ms until its lease ends, …}, who ends first in front; 0 and less: it has ended
local found = redis.call('ZRANGE', consumers, 0, -1, 'WITHSCORES')
for i = 2, #found, 2 do found[i] = math.max(tonumber(found[i]) - now_ms, -1) end
return found
