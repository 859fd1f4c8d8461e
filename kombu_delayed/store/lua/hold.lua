-- hold: extend the time for which tasks hold their unique keys, or release the keys of ended tasks.
-- Idempotent: the key of another task does not change.
-- keys: unique_held unique_until
-- arguments: now entries...
--   entries: key, id of its task, ms from now on (0: the task has ended); …
-- include: clock
-- returns how many keys belonged to these tasks; O(log n) a key
redis.call('PERSIST', unique_until)  -- a full server accepts writes only after one that takes no memory
local count = 0
for i = 1, #entries, 3 do
  local key, left_ms = entries[i], tonumber(entries[i + 2])
  if redis.call('HGET', unique_held, key) == entries[i + 1] then
    count = count + 1
    if left_ms > 0 then
      redis.call('ZADD', unique_until, now_ms + left_ms, key)
    else
      redis.call('HDEL', unique_held, key)
      redis.call('ZREM', unique_until, key)
    end
  end
end
return count
