-- retry_limit: let messages that wait for a limit try again after its numbers have changed.
-- Idempotent; call it until the cursor is 0 again.
-- keys: wake gate ready...
-- arguments: now name cursor count:number steps
--   name: the limit, as in the names of slots
-- include: clock waiting ready
-- returns the next cursor; O(count · log n)
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local next_cursor, found = unpack(redis.call('ZSCAN', gate .. 'looks', cursor, 'MATCH', name .. ':*', 'COUNT', count))
for i = 1, #found, 2 do redis.call('ZADD', gate .. 'looks', now_ms, found[i]) end
if redis.call('EXISTS', gate .. 'looks') == 1 then announce_ready() end
return next_cursor
