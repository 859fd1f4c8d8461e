-- backlog: the two-level tree of due times, with the delayed messages. After earliest.
-- needs: partitions delayed messages duplicates
local function new_partition(bound)
  local name = string.format('%.0f', bound)
  while redis.call('EXISTS', delayed .. name) == 1 do name = name .. "'" end
  redis.call('ZADD', partitions, bound, name)
  return name
end

local function move(source, start, count, target)
  while count > 0 do
    local n = math.min(count, 1000)
    local entries = redis.call('ZRANGE', source, start, start + n - 1, 'WITHSCORES')
    for i = 1, #entries, 2 do entries[i], entries[i + 1] = entries[i + 1], entries[i] end
    redis.call('ZADD', target, unpack(entries))
    redis.call('ZREMRANGEBYRANK', source, start, start + n - 1)
    count = count - n
  end
end

-- Splits near the median, or near the end if `last_ms`, the latest addition, is the end: messages that arrive in order
-- then leave full partitions behind and are not moved. Never splits between equal due times, and moves the smaller
-- side: a thousand messages due at one instant stay where they are.
local function split(name, count, last_ms)
  local key = delayed .. name
  local is_in_order = last_ms >= tonumber(redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2])
  local at = math.floor(count * (is_in_order and 0.9 or 0.5))
  local bound = redis.call('ZRANGE', key, at, at, 'WITHSCORES')[2]
  local below = redis.call('ZCOUNT', key, '-inf', '(' .. bound)
  if below == 0 then
    bound = redis.call('ZRANGEBYSCORE', key, '(' .. bound, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    if not bound then return end
    below = redis.call('ZCOUNT', key, '-inf', '(' .. bound)
  end
  if below >= count - below then
    move(key, below, count - below, delayed .. new_partition(tonumber(bound)))
  else
    local lower = new_partition(tonumber(redis.call('ZSCORE', partitions, name)))
    redis.call('ZADD', partitions, bound, name)
    move(key, 0, below, delayed .. lower)
  end
end

local function partition_for(due_ms)
  local name = redis.call('ZREVRANGEBYSCORE', partitions, due_ms, '-inf', 'LIMIT', 0, 1)[1]
  if name then return name end
  local first = redis.call('ZRANGE', partitions, 0, 0)[1]
  if not first then return new_partition(due_ms) end
  redis.call('ZADD', partitions, due_ms, first)
  return first
end

local function index(id, due_ms, partition_size)
  local name = partition_for(due_ms)
  redis.call('ZADD', delayed .. name, due_ms, id)
  local count = redis.call('ZCARD', delayed .. name)
  if count >= partition_size then split(name, count, due_ms) end
end

-- In the backlog, a record has its due time between the step and the message.
local function parts_of(kept)
  return kept:match('^(.)(%d+)(.*)$')
end

local function same(kept, record)
  -- include: marks
  local step, _, message = parts_of(kept)
  local other = step .. message
  if other:find(ZSTD, 1, true) or record:find(ZSTD, 1, true) then return marks_of(other) == marks_of(record) end
  return without_sender(other) == without_sender(record)
end

local function with_due(record, due_ms)
  return record:sub(1, 1) .. string.format('%.0f', due_ms) .. record:sub(2)
end

-- Few queues have messages that share an id, or that are less urgent than step 0: `least` is the least urgent step.
-- Both are nil until `store` reads them.
local has_duplicates, least

-- Stores under the first free member of id, id~2, id~3 … and returns it, or nil if the same message is already
-- delayed: its publisher lost the answer and sent it again. A message with a relative delay is another one each time,
-- so it may repeat. An id may itself look like a duplicate of another id.
local function store(id, kept, may_repeat)
  if has_duplicates == nil then  -- one call for both keys: most queues have neither
    has_duplicates = redis.call('EXISTS', duplicates, partitions .. ':urgent') > 0
    least = 0
    if has_duplicates then
      has_duplicates = redis.call('EXISTS', duplicates) == 1
      least = (redis.call('ZSCORE', partitions .. ':urgent', '\31') or 31 * 2 ^ 48) - 31 * 2 ^ 48
    end
  end
  local highest = has_duplicates and tonumber(redis.call('HGET', duplicates, id) or 1) or 1
  if highest == 1 and bucket_add(messages, id, kept) then return id end

  local function member_of(n)
    return n == 1 and id or id .. '\31' .. n
  end

  local step, _, message = parts_of(unpacked(id, kept))
  local free = highest + 1
  for n = highest, 1, -1 do
    local other = bucket_get(messages, member_of(n))
    if not other then
      free = n
    elseif not may_repeat and same(other, step .. message) then
      bucket_set(messages, member_of(n), other)  -- a write for the sender's WAIT to wait for
      return nil
    end
  end
  while not bucket_add(messages, member_of(free), kept) do free = free + 1 end
  if free > highest then
    redis.call('HSET', duplicates, id, free)
    has_duplicates = true
  end
  return member_of(free)
end

-- Promotion writes after the brace, so spaces that another program put in front of it are removed.
local function put(id, due_ms, record, partition_size, may_repeat)
  if record:sub(2, 2) ~= '{' then record = record:gsub('^(.)%s+', '%1') end
  local member = store(id, with_due(record, due_ms), may_repeat)
  if member then
    index(member, due_ms, partition_size)
    if least ~= record:byte() - 48 then
      -- include: urgent
      hint(member, record:byte(), due_ms)
    end
  end
  return member
end

local function members_of(id)
  local members = {id}
  for n = 2, tonumber(redis.call('HGET', duplicates, id) or 1) do members[n] = id .. '\31' .. n end
  return members
end

-- A message at a gate is in no partition. Its lane notices that it is gone when its turn comes.
local function unindex(member, due_ms)
  local name = redis.call('ZREVRANGEBYSCORE', partitions, due_ms, '-inf', 'LIMIT', 0, 1)[1]
  local key = name and delayed .. name
  if not name or redis.call('ZREM', key, member) == 0 then
    redis.call('ZREM', delayed .. 'waiting', member)
  elseif redis.call('EXISTS', key) == 0 then
    redis.call('ZREM', partitions, name)
  end
end

-- Gives a delayed message another due time.
local function put_off(member, step, old_ms, message, due_ms, partition_size)
  unindex(member, old_ms)
  bucket_set(messages, member, string.format('%s%.0f', step, due_ms) .. message)
  index(member, due_ms, partition_size)
  if least ~= step:byte() - 48 then
    -- include: urgent
    hint(member, step:byte(), due_ms)
  end
end

-- Removes one message from the tree. Returns its due time and its record, or nil if it is not delayed.
local function take(member)
  local kept = bucket_get(messages, member)
  local due_ms = kept and kept:match('^.(%d+)')
  if not due_ms then return nil end
  unindex(member, due_ms)
  bucket_drop(messages, member)
  if member:find('\31', 1, true) then
    -- include: forget_duplicate
    forget_duplicate(member)
  end
  return due_ms, kept
end

-- Passes members to `take`, which returns how many bytes it has read: a few at a time, until `had` reaches a megabyte,
-- which takes the server some ten milliseconds. Returns how many were passed.
local function give(members, take, had)
  local first = had.count
  while had.count - first < #members and had.bytes < 2 ^ 20 do
    local more = math.min(4 * had.count, 50, (2 ^ 20 - had.bytes) * had.count / math.max(had.bytes, 1))
    local from = had.count - first
    local some = {unpack(members, from + 1, math.min(from + math.max(math.floor(more), 1), #members))}
    had.bytes, had.count = had.bytes + take(some), had.count + #some
  end
  return had.count - first
end

-- Removes due messages from the tree and passes them to `take`. Returns their members, and whether more are due.
local function pop_due(now_ms, limit, take)
  local members, had = {}, {bytes = 0, count = 0}
  while #members < limit do
    local name = redis.call('ZRANGE', partitions, 0, 0)[1]
    if not name then return members, false end
    local key = delayed .. name
    local found = redis.call('ZRANGEBYSCORE', key, '-inf', now_ms, 'LIMIT', 0, limit - #members)
    if #found == 0 then return members, false end
    local count = give(found, take, had)
    for i = 1, count do members[#members + 1] = found[i] end
    if count > 0 then redis.call('ZREMRANGEBYRANK', key, 0, count - 1) end
    if redis.call('EXISTS', key) == 0 then redis.call('ZREM', partitions, name) end
    if count < #found then return members, true end
  end
  local next_ms = earliest()
  return members, next_ms ~= nil and next_ms <= now_ms
end

-- As `pop_due`, but from the other end: the messages that became due last.
local function pop_due_last(now_ms, limit, take)
  local name = redis.call('ZREVRANGEBYSCORE', partitions, now_ms, '-inf', 'LIMIT', 0, 1)[1]
  if not name then return {} end
  local key = delayed .. name
  local members = redis.call('ZREVRANGEBYSCORE', key, now_ms, '-inf', 'LIMIT', 0, limit)
  members = {unpack(members, 1, give(members, take, {bytes = 0, count = 0}))}
  if #members > 0 then redis.call('ZREM', key, unpack(members)) end
  if redis.call('EXISTS', key) == 0 then redis.call('ZREM', partitions, name) end
  return members
end

-- The wait of a message is at the front of its JSON, and has no brace inside.
local function without_wait(record)
  local due, behind = record:match('^(.{"due_ms": ?%d+, ?)"wait": ?{[^}]*}, ?()')
  if not due then due, behind = record:match('^(.{)"wait": ?{[^}]*}, ?()') end
  return due and due .. record:sub(behind) or record
end

-- Also removes the due time of a promotion.
local function with_wait(record, wait)
  record = without_wait(record:gsub('^(.)%s+', '%1'))
  record = record:gsub('^(.){"due_ms": ?%d+, ?', '%1{')
  return record:sub(1, 2) .. wait .. ',' .. record:sub(3)
end
