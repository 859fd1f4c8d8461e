-- sort_held: sort the tags of a large unacked hash, a bounded part per call.
-- Idempotent.
-- keys: unacked held
-- arguments: cursor count:number
--   count: about how many tags a call sorts
-- returns the next cursor; '0' when all are sorted
redis.call('ZREM', held, '')       -- a full server accepts writes only after a script has freed memory
local page = redis.call('HSCAN', unacked, cursor, 'COUNT', count)
for i = 1, #page[2], 2 do redis.call('ZADD', held, page[2][i], page[2][i]) end
redis.call('PEXPIRE', held, 3600000)  -- the caller may die; without this key all tags are sorted again
return page[1]
