-- shift: move all due times of a queue by so much, and tell a consumer.
-- Twice moves them twice.
-- keys: partitions delayed messages duplicates wake
-- arguments: now by_ms:number partition_size:number
--   by_ms: below 0: they are due sooner
-- include: clock waiting buckets backlog
-- returns how many are due by it that were not; O(n log n) for all that is delayed
local members = {}
for _, name in ipairs(redis.call('ZRANGE', partitions, 0, -1)) do
  for _, member in ipairs(redis.call('ZRANGE', delayed .. name, 0, -1)) do
    members[#members + 1] = member
  end
end

local fell_due = 0
for _, member in ipairs(members) do
  local step, old_ms, message = parts_of(bucket_get(messages, member))
  local due_ms = math.max(old_ms + by_ms, 1)
  unindex(member, old_ms)
  bucket_set(messages, member, string.format('%s%.0f', step, due_ms) .. message)
  index(member, due_ms, partition_size)
  if tonumber(old_ms) > now_ms and due_ms <= now_ms then fell_due = fell_due + 1 end
end
local next_ms = earliest()
if next_ms then announce_due(next_ms) end
return fell_due
