-- reset_limit: apply the declared numbers of a limit again. Call retry_limit afterwards.
-- Idempotent.
-- keys: gate absent
-- arguments: name
--   name: the limit, as in the names of slots
-- returns 1 if there was an override, else 0
return redis.call('HDEL', gate .. 'overrides', name)
