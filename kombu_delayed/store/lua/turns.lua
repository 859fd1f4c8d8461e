-- turns: read when it is whose turn. It changes nothing.
-- keys: gate absent
-- arguments: keys...
--   keys: fairness keys
-- returns for each how many have their turns before it, or -1 where it has none; O(log n) a key
for i, key in ipairs(keys) do keys[i] = redis.call('ZRANK', gate .. 'turns', key) or -1 end
return keys
