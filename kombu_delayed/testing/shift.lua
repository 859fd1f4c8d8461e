-- shift: move all times of a queue by the same amount, and tell a consumer: due times, the ends of a pause and of limits
-- that were set and, when moving ahead, the times of the next tokens of rates.
-- Not idempotent: twice moves them twice.
-- keys: partitions delayed messages duplicates wake gate paused ready...
-- arguments: now by_ms:number partition_size:number steps
--   by_ms: below 0: the times become earlier
-- include: clock waiting ready buckets earliest backlog gate announce
-- returns how many are due by it that were not; O(n log n) for all that is delayed, O(all keys)
local function moved(at_ms)
  return math.max(at_ms + by_ms, 1)
end

local function set_due(member)
  local step, old_ms, message = parts_of(bucket_get(messages, member))
  local due_ms = moved(old_ms)
  bucket_set(messages, member, string.format('%s%.0f', step, due_ms) .. message)
  return due_ms, tonumber(old_ms)
end

local members = {}
for _, name in ipairs(redis.call('ZRANGE', partitions, 0, -1)) do
  for _, member in ipairs(redis.call('ZRANGE', delayed .. name, 0, -1)) do
    members[#members + 1] = member
  end
end
local fell_due = 0
for _, member in ipairs(members) do
  local due_ms, old_ms = set_due(member)
  unindex(member, old_ms)
  index(member, due_ms, partition_size)
  if old_ms > now_ms and due_ms <= now_ms then fell_due = fell_due + 1 end
end

-- At the gate, too, where it may matter how late they are.
for _, member in ipairs(redis.call('ZRANGE', waiting, 0, -1)) do
  redis.call('ZADD', waiting, (set_due(member)), member)
end
local lanes = redis.call('HGETALL', gate .. 'lanes')
for i = 1, #lanes, 2 do
  local lane, limit = lanes[i], lanes[i + 1]
  local key = parts_of_lane(lane).key
  redis.call('ZADD', limit == '' and gate .. 'turn:' .. key or blocked_line(limit, key), 'XX', 'INCR', by_ms, lane)
  for _, member in ipairs(redis.call('ZRANGE', gate .. 'lane:' .. lane, 0, -1)) do
    redis.call('ZINCRBY', gate .. 'lane:' .. lane, by_ms, member)
  end
end

local function with_end(note, before)
  return (note:gsub('^(' .. before .. ')([1-9]%d*)', function(front, until_ms)
    return string.format('%s%.0f', front, moved(until_ms))
  end))
end

local overrides = redis.call('HGETALL', gate .. 'overrides')
for i = 1, #overrides, 2 do
  redis.call('HSET', gate .. 'overrides', overrides[i], with_end(overrides[i + 1], '%S+ %S+ %S+ '))
end
local pause = redis.call('GET', paused)
if pause then
  pause = with_end(pause, '%d+ ')
  redis.call('SET', paused, pause, 'KEEPTTL')
  announce_due(tonumber(pause:match(' (%d+)')))
end

if by_ms < 0 then
  local rate = gate .. 'rate:'
  for _, key in ipairs(redis.call('KEYS', '*')) do
    if key:sub(1, #rate) == rate then
      local until_ms = redis.call('GET', key) + by_ms
      redis.call('SET', key, string.format('%.3f', until_ms), 'PX', math.max(math.ceil(until_ms - now_ms), 1))
    end
  end
  for _, limit in ipairs(redis.call('ZRANGE', gate .. 'looks', 0, -1)) do
    redis.call('ZINCRBY', gate .. 'looks', by_ms, limit)
  end
end
announce_all()
return fell_due
