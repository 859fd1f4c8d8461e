-- declare: declare the policies of a queue, unless it has others than the caller knows.
-- Idempotent: a second call finds others.
-- keys: policies
-- arguments: now known version text by
--   known: the version that the caller has read; empty: none
--   version: of the new policies; it changes with their meaning
--   text: the new policies as JSON
--   by: who declares them
-- include: clock
-- returns 1, or 0 if another version is declared
if (redis.call('HGET', policies, 'version') or '') ~= known then return 0 end
redis.call('HDEL', policies, '')  -- a full server accepts writes only after a script has freed memory
redis.call('HSET', policies, 'version', version, 'text', text, 'by', by, 'at', string.format('%.0f', now_ms))
return 1
