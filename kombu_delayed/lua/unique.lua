-- unique: schedule a message unless one with the same key is delayed: then it is refused, takes the other's
-- place, or pushes the other's due time.
-- Twice is safe for a due time: the message that is there already counts as stored.
local partitions     = KEYS[1]             -- ZSET partition -> lower bound of its due times
local delayed        = KEYS[2]             -- what the partitions' keys begin with
local messages       = KEYS[3]             -- HASH id -> priority step + due_ms + message
local duplicates     = KEYS[4]             -- HASH id -> how many messages share it
local wake           = KEYS[5]             -- ZSET token -> when to claim
local unique         = KEYS[6]             -- HASH key -> id of the delayed message with it
local unique_due     = KEYS[7]             -- ZSET key -> when that one was due last
local events         = KEYS[8]             -- STREAM of lifecycle events
local ready          = {unpack(KEYS, 9)}   -- LIST per priority step
local now            = ARGV[1]
local partition_size = tonumber(ARGV[2])
local steps          = ARGV[3]
local expires_ms     = tonumber(ARGV[4])   -- of the ready lists; 0: never
local conflict       = ARGV[5]             -- refuse, replace or debounce; retry: keep it, and nothing against it
local key            = ARGV[6]
local id             = ARGV[7]
local due            = ARGV[8]             -- ms since the epoch, or + and ms from now
local record         = ARGV[9]             -- priority step + message
local event_limit    = tonumber(ARGV[10])  -- about so many are kept; 0: none
-- include: clock ready backlog events unique
-- returns {'stored', 'refused', 'replaced' or 'pushed', id of the other one or ''}; O(log n)
local before = earliest()
local due_ms = tonumber(due)
if due:sub(1, 1) == '+' then due_ms = now_ms + due_ms end

local function forget(which)
  redis.call('HDEL', unique, which)
  redis.call('ZREM', unique_due, which)
end

-- What is past is cleared a little each time.
local function clear_past()
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', unique_due, '-inf', now_ms, 'LIMIT', 0, 10)) do
    local kept = redis.call('HGET', messages, redis.call('HGET', unique, old) or '')
    local _, later_ms = parts_of(kept or '')
    if later_ms then
      redis.call('ZADD', unique_due, later_ms, old)
    else
      forget(old)
    end
  end
end

-- Returns what the backlog calls the message, or nil where it is due and so ready.
local function place(event, member, at_ms, step, message)
  if at_ms > now_ms then
    local stored = put(member, at_ms, step .. message, partition_size, true)
    announce_due(at_ms, before)
    tell(event, member, message, at_ms)
    return stored
  end
  if event == 'rescheduled' then tell(event, member, message, at_ms) end
  local list = list_for(step)
  redis.call('LPUSH', list, message)
  if expires_ms > 0 then redis.call('PEXPIRE', list, expires_ms) end
  announce_ready()
end

clear_past()
local other = redis.call('HGET', unique, key)
local kept = other and redis.call('HGET', messages, other)
if kept and other == id and same(kept, record) then return {'stored', ''} end
if conflict == 'retry' then
  if other == id then forget(key) end
  place('scheduled', id, due_ms, record:sub(1, 1), record:sub(2))
  return {'stored', ''}
end
if kept and conflict == 'refuse' then return {'refused', other} end

local step, message = record:sub(1, 1), record:sub(2)
local answer, event = {'stored', ''}, 'scheduled'
if kept and conflict == 'debounce' then
  local _
  step, _, message = take(other)
  id = other
  if due_ms <= now_ms then message = string.format('{"due_ms":%.0f,', due_ms) .. message:sub(2) end
  answer, event = {'pushed', other}, 'rescheduled'
elseif kept then
  local _, other_ms, replaced = take(other)
  tell('cancelled', other, replaced, other_ms)
  answer = {'replaced', other}
end
local stored = place(event, id, due_ms, step, message)
if stored then
  remember(key, stored, due_ms)
else
  forget(key)
end
return answer
