-- consumers: the consumers of a queue, and the time left on their leases.
-- keys: consumers
-- arguments: now
-- include: clock
-- returns {consumer, ms until its lease ends, …}, the first to end in front; 0 or less: it has expired
local found = redis.call('ZRANGE', consumers, 0, -1, 'WITHSCORES')
for i = 2, #found, 2 do found[i] = math.max(tonumber(found[i]) - now_ms, -1) end
return found
