-- repair_gate: report what is wrong at a gate, and repair it: slots that are not those of consumers, and messages that
-- wait in no line. The first call counts all slots, and each call scans a page of messages.
-- Idempotent: correct entries do not change.
-- keys: partitions delayed messages duplicates wake consumers gate ready...
-- arguments: now steps cursor count:number fixes
--   count: about how many messages to scan
-- include: clock waiting ready buckets backlog gate arrive
-- returns {the next cursor, '0' at the end, messages scanned, bytes read, limit or id, fault, …};
--   O(count · log n + slots in use)
if fixes == '1' then redis.call('ZREM', wake, '') end  -- a full server accepts writes only after a script has freed memory
local faults = {}

local function say(name, fault)
  faults[#faults + 1], faults[#faults + 2] = name, fault
end

local function count_slots()
  local sums = {}
  for _, consumer in ipairs(redis.call('ZRANGE', consumers, 0, -1)) do
    for _, slots in ipairs(redis.call('HVALS', gate .. 'slots:' .. consumer)) do
      for limit, cost in slots:gmatch('|([^|*]+)%*(%d+)') do sums[limit] = (sums[limit] or 0) + cost end
    end
  end
  local counted = redis.call('HGETALL', gate .. 'slots')
  for i = 1, #counted, 2 do
    local limit = counted[i]
    if tonumber(counted[i + 1]) ~= sums[limit] then
      say(limit, 'slots')
      sums[limit] = sums[limit] or 0
    else
      sums[limit] = nil
    end
  end
  for limit, sum in pairs(sums) do
    if redis.call('HEXISTS', gate .. 'slots', limit) == 0 then say(limit, 'slots') end
    if fixes == '1' then
      redis.call('HDEL', gate .. 'slots', limit)
      if sum > 0 then redis.call('HSET', gate .. 'slots', limit, sum) end
      unblock(limit)
    end
  end
end

local function is_in_line(member, lane)
  if not redis.call('ZSCORE', gate .. 'lane:' .. lane, member) then return false end
  local limit = redis.call('HGET', gate .. 'lanes', lane)
  if not limit then return false end
  local key = parts_of_lane(lane).key
  local line = limit == '' and gate .. 'turn:' .. key or blocked_line(limit, key)
  local lines = limit == '' and 'turns' or 'blocked:' .. limit
  return redis.call('ZSCORE', line, lane) and redis.call('ZSCORE', gate .. lines, key)
end

local function put_right(member, kept, lane)
  redis.call('ZREM', waiting, member)
  if lane then
    admit(member, lane, tonumber(kept:match('^.(%d+)')), '')
    let_arrive()
    open(lane)
  else
    index(member, tonumber(kept:match('^.(%d+)')), 1e9)
  end
end

if cursor == '0' then count_slots() end
local page = redis.call('ZSCAN', waiting, cursor, 'COUNT', count)
local bytes = 0
for i = 1, #page[2], 2 do
  local member = page[2][i]
  local kept = bucket_get(messages, member)
  local lane = kept and select(4, ticket_in(kept))
  if lane and not parts_of_lane(lane) then lane = nil end
  bytes = bytes + #(kept or '')
  if not kept then
    say(member, 'gone')
    if fixes == '1' then redis.call('ZREM', waiting, member) end
  elseif not (lane and is_in_line(member, lane)) then
    say(member, 'stuck')
    if fixes == '1' then put_right(member, kept, lane) end
  end
end
if fixes == '1' and redis.call('EXISTS', gate .. 'turns') == 1 then announce_ready() end
return {page[1], #page[2] / 2, bytes, unpack(faults)}
