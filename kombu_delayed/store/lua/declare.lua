-- declare: say which policies hold for a queue from now on, unless others do than the caller knows of.
-- Twice is safe: the second one finds others.
-- keys: policies
-- arguments: now known version text by
--   known: the version that the caller has read; empty: none
--   version: of what is declared, which changes with its meaning
--   text: JSON: what is declared
--   by: who declares it
-- include: clock
-- returns 1, or 0 where another version holds
if (redis.call('HGET', policies, 'version') or '') ~= known then return 0 end
redis.call('HSET', policies, 'version', version, 'text', text, 'by', by, 'at', string.format('%.0f', now_ms))
return 1
