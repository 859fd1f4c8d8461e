-- current_dictionary: which dictionary a queue's messages are compressed with.
-- Twice is safe: one caller is asked to look whether another dictionary does better.
-- keys: dictionaries
-- arguments: now check_ms:number
--   check_ms: how long that is not looked at again
-- include: clock
-- returns {its version, '' where there is none, 1 where the caller is to look}; O(1)
local current, checked_ms = unpack(redis.call('HMGET', dictionaries, 'current', 'checked'))
if not current then return {'', 1} end
if math.abs(now_ms - tonumber(checked_ms)) < check_ms then return {current, 0} end
redis.call('HSET', dictionaries, 'checked', now_ms)
return {current, 1}
