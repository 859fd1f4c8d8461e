-- repair_unique: scan a part of the unique keys for those without a message, and forget them.
-- Idempotent: the key of a message does not change.
-- keys: messages unique unique_due absent
-- arguments: part cursor count:number fixes
--   part: the key whose entries are scanned: unique or due
-- include: buckets bucket_scan repair
-- returns {the next cursor, '0' at the end, keys scanned, bytes read, key, fault, …}, where a fault is key (one
--   without its id or its time) or leftover (the message is gone, as after some moves); O(count · log n)
local function due_of(key)
  local kept = bucket_get(messages, redis.call('HGET', unique, key) or '')
  return kept and kept:match('^.(%d+)')
end

local function fault_of(key)
  local is_whole = redis.call('HEXISTS', unique, key) == 1 and redis.call('ZSCORE', unique_due, key)
  return not is_whole and 'key' or not due_of(key) and 'leftover'
end

local function put_right(key)
  local due_ms = due_of(key)
  if due_ms then
    redis.call('ZADD', unique_due, due_ms, key)
  else
    redis.call('HDEL', unique, key)
    redis.call('ZREM', unique_due, key)
  end
end

if part == 'due' then return looked_through('ZSCAN', unique_due, fault_of, put_right) end
return looked_through('HSCAN', unique, fault_of, put_right)
