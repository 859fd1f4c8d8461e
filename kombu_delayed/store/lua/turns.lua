-- turns: read how soon fairness keys have their turns. Read-only.
-- keys: gate absent
-- arguments: keys...
--   keys: fairness keys
-- returns for each how many keys come before it, or -1 if it has no turns; O(log n) a key
for i, key in ipairs(keys) do keys[i] = redis.call('ZRANK', gate .. 'turns', key) or -1 end
return keys
