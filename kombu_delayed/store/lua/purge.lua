-- purge: delete ready and delayed messages, a bounded part of the backlog per call.
-- Idempotent; call it until no more are left.
-- keys: partitions delayed messages duplicates wake unique unique_due unique_held unique_until ready...
-- arguments: limit:number
--   limit: how many delayed messages a call deletes
-- include: buckets
-- returns {how many messages were deleted, 1 if more delayed ones may be left}; O(deleted messages)
local count = 0
for _, list in ipairs(ready) do
  count = count + redis.call('LLEN', list)
  redis.call('UNLINK', list)
end
redis.call('UNLINK', unique_held, unique_until)
local left = limit
while left > 0 do
  local name = redis.call('ZRANGE', partitions, 0, 0)[1]
  if not name then break end
  local members = redis.call('ZRANGE', delayed .. name, 0, math.min(left, 1000) - 1)
  count = count + bucket_drop_all(messages, members)
  redis.call('ZREMRANGEBYRANK', delayed .. name, 0, #members - 1)
  if redis.call('EXISTS', delayed .. name) == 0 then redis.call('ZREM', partitions, name) end
  left = left - #members
end
local waiting = delayed .. 'waiting'
while left > 0 do
  local members = redis.call('ZRANGE', waiting, 0, math.min(left, 1000) - 1)
  if #members == 0 then break end
  count = count + bucket_drop_all(messages, members)
  redis.call('ZREMRANGEBYRANK', waiting, 0, #members - 1)
  left = left - #members
end
if redis.call('EXISTS', partitions, waiting) == 0 then
  redis.call('UNLINK', duplicates, unique, unique_due, partitions .. ':urgent')
  redis.call('ZREM', wake, 'now', 'due')
end
return {count, left > 0 and 0 or 1}
