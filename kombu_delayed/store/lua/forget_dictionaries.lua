-- forget_dictionaries: drop the dictionaries of a queue that has had no message in any state for a while.
-- Twice is safe.
-- keys: messages dead_messages consumers dictionaries ready...
-- arguments: now idle_ms:number
--   idle_ms: how long it has to have been empty, in which nobody reads what has just left it; 0: it goes at once
-- include: clock
-- returns 1 where they are gone; O(consumers)
if redis.call('EXISTS', dictionaries) == 0 then return 1 end
local is_empty = redis.call('EXISTS', messages, dead_messages, messages .. ':buckets', dead_messages .. ':buckets', unpack(ready)) == 0
for _, consumer in ipairs(is_empty and redis.call('ZRANGE', consumers, 0, -1) or {}) do
  is_empty = is_empty and redis.call('EXISTS', dictionaries:match('^.*}:') .. 'unacked:' .. consumer) == 0
end
if not is_empty then
  redis.call('HDEL', dictionaries, 'idle')
  return 0
end
redis.call('HSETNX', dictionaries, 'idle', now_ms)
local since_ms = math.min(tonumber(redis.call('HGET', dictionaries, 'idle')), now_ms)
if now_ms - since_ms < idle_ms then return 0 end
redis.call('UNLINK', dictionaries)
return 1
