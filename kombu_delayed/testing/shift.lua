-- shift: move all due times of a queue by so much, and tell a consumer.
-- Twice moves them twice.
local partitions     = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed        = KEYS[2]            -- what the partitions' keys begin with
local messages       = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates     = KEYS[4]            -- HASH id -> how many messages share it
local wake           = KEYS[5]            -- ZSET token -> when to claim
local now            = ARGV[1]
local by_ms          = tonumber(ARGV[2])  -- below 0: they are due sooner
local partition_size = tonumber(ARGV[3])
-- include: clock waiting backlog
-- returns how many are due by it that were not; O(n log n) for all that is delayed
local members = {}
for _, name in ipairs(redis.call('ZRANGE', partitions, 0, -1)) do
  for _, member in ipairs(redis.call('ZRANGE', delayed .. name, 0, -1)) do
    members[#members + 1] = member
  end
end

local fell_due = 0
for _, member in ipairs(members) do
  local step, old_ms, message = parts_of(redis.call('HGET', messages, member))
  local due_ms = math.max(old_ms + by_ms, 1)
  unindex(member, old_ms)
  redis.call('HSET', messages, member, string.format('%s%.0f', step, due_ms) .. message)
  index(member, due_ms, partition_size)
  if tonumber(old_ms) > now_ms and due_ms <= now_ms then fell_due = fell_due + 1 end
end
local next_ms = earliest()
if next_ms then announce_due(next_ms) end
return fell_due
