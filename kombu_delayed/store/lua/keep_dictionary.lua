-- keep_dictionary: compress a queue's messages with a new dictionary from now on.
-- Idempotent: if another process was faster, its dictionary stays.
-- keys: dictionaries
-- arguments: now before version text most:number
--   before: the version that it replaces; empty: there is none
--   version, text: of the new dictionary
--   most: how many versions to keep at most
-- include: clock
-- returns the version to compress with; O(1)
local current, count = unpack(redis.call('HMGET', dictionaries, 'current', 'count'))
if (current or '') ~= before or tonumber(count or 0) >= most then return current or '' end
redis.call('HSET', dictionaries, version, text, 'since:' .. version, now_ms, 'current', version, 'checked', now_ms)
redis.call('HINCRBY', dictionaries, 'count', 1)
return version
