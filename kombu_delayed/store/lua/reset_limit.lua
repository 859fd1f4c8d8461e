-- reset_limit: let the numbers of a limit hold that are declared. Call retry_limit then.
-- Twice is safe.
-- keys: gate absent
-- arguments: name
--   name: the limit, as slots name it
-- returns 1 if other numbers were set, else 0
return redis.call('HDEL', gate .. 'overrides', name)
