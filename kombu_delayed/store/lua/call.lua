-- call: make a consumer claim, because there may be slots of a global limit for which messages wait.
-- Idempotent.
-- keys: wake gate ready...
-- arguments: steps
-- include: waiting ready
-- returns 1 if any wait for limits, else 0; O(1)
if redis.call('EXISTS', gate .. 'looks') == 0 then return 0 end
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
announce_ready()
return 1
