-- sort_held: put the tags of a large unacked hash in order, a bounded part a call.
-- Twice is safe.
-- keys: unacked held
-- arguments: cursor count:number
--   count: tags a call, about
-- returns the next cursor; '0' when all are in order
redis.call('ZREM', held, '')       -- a full server lets a script write that has freed memory first
local page = redis.call('HSCAN', unacked, cursor, 'COUNT', count)
for i = 1, #page[2], 2 do redis.call('ZADD', held, page[2][i], page[2][i]) end
redis.call('PEXPIRE', held, 3600000)  -- its caller may die; without it a call sorts all anew
return page[1]
