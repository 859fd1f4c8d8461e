-- current_dictionary: the dictionary that compresses a queue's messages.
-- Safe to repeat: only one caller is asked to check whether another dictionary does better.
-- keys: dictionaries
-- arguments: now check_ms:number
--   check_ms: the time between such checks
-- include: clock
-- returns {its version, or '' if there is none; 1 if the caller should check}; O(1)
local current, checked_ms = unpack(redis.call('HMGET', dictionaries, 'current', 'checked'))
if not current then return {'', 1} end
if math.abs(now_ms - tonumber(checked_ms)) < check_ms then return {current, 0} end
redis.call('HSET', dictionaries, 'checked', now_ms)
return {current, 1}
