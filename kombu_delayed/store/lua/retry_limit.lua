-- retry_limit: let what waits for a limit try again, as its numbers have changed.
-- Twice is safe; call it until the cursor is 0 again.
-- keys: wake gate ready...
-- arguments: now name cursor count:number steps
--   name: the limit, as slots name it
-- include: clock waiting ready
-- returns the next cursor; O(count · log n)
local next_cursor, found = unpack(redis.call('ZSCAN', gate .. 'looks', cursor, 'MATCH', name .. ':*', 'COUNT', count))
for i = 1, #found, 2 do redis.call('ZADD', gate .. 'looks', now_ms, found[i]) end
if redis.call('EXISTS', gate .. 'looks') == 1 then announce_ready() end
return next_cursor
