-- unique: schedule a message unless one with the same key is delayed. Then the new one is refused, replaces the other, or
-- moves the due time of the other.
-- Idempotent for a due time: the message that is there already counts as stored.
-- keys: partitions delayed messages duplicates wake unique unique_due unique_held unique_until events moved ready...
-- arguments: now partition_size:number bucket_bytes:number steps expires_ms:number conflict key id due record event_limit:number until_end:number
-- arguments: replaces:number
--   conflict: refuse, replace or debounce; retry: schedule it in any case
--   due: ms since the epoch, or + and ms from now
--   record: priority step + message
--   until_end: 1: it holds its key until its task has ended, and others are refused even if it is no longer delayed
--   replaces: 1: it replaces a running task, whose id it has
-- include: clock waiting ready buckets bucket_add earliest backlog events moved unique of_queue expiry
-- returns {'stored', 'refused', 'replaced' or 'pushed', id of the other one or '', 'delayed', 'ready' or (not stored, or
--   there before) 'already', due time of the sent message, step + due_ms + message of the replaced one or ''}; O(log n)
local HELD_MS = 30 * 86400000  -- how long after its due time a task holds its key at most
local before = earliest()
local other  -- the message that has the key
local holder  -- the task that holds it until its end
local due_ms = tonumber(due)
if due:sub(1, 1) == '+' then due_ms = now_ms + due_ms end

local function forget(ids, times, which)
  redis.call('HDEL', ids, which)
  redis.call('ZREM', times, which)
end

-- Each call removes a few past keys. The key of a message that is still delayed becomes past `longer_ms` after its due
-- time.
local function clear_past(ids, times, longer_ms)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', times, '-inf', now_ms, 'LIMIT', 0, 10)) do
    local kept = bucket_get(messages, redis.call('HGET', ids, old) or '')
    local _, later_ms = parts_of(kept or '')
    if later_ms then
      redis.call('ZADD', times, later_ms + longer_ms, old)
    else
      forget(ids, times, old)
    end
  end
end

local function hold(which, at_ms)
  redis.call('HSET', unique_held, key, which)
  redis.call('ZADD', unique_until, math.max(at_ms, now_ms) + HELD_MS, key)
end

local function make_ready(step, message)
  redis.call('LPUSH', list_for(step), message)
  announce_ready()
  if expires_ms > 0 then expire_as_declared(expires_ms, 0) else expire_as_noted() end
end

-- Returns the name of the message in the backlog, or nil if it is not there, and its state.
local function place(may_repeat)
  if due_ms <= now_ms then
    make_ready(record:sub(1, 1), record:sub(2))
    return nil, 'ready'
  end
  local stored = put(id, due_ms, record, partition_size, may_repeat)
  if not stored then return nil, 'already' end
  announce_due(due_ms, before)
  tell('scheduled', id, record, due_ms)
  if conflict == 'retry' or other == id then note_move(stored) end
  return stored, 'delayed'
end

local function push(member, kept)
  local step, old_ms, message = parts_of(kept)
  tell('rescheduled', member, message, due_ms)
  if due_ms <= now_ms then
    take(member)
    forget(unique, unique_due, key)
    make_ready(step, string.format('{"due_ms":%.0f,', due_ms) .. message:sub(2))
  else
    put_off(member, step, old_ms, message, due_ms, partition_size)
    note_move(member)
    announce_due(due_ms, before)
    remember(key, member, due_ms)
  end
end

-- This changes nothing, but a full server refuses it. Past keys stay then: it would accept the message after their removal.
if type(redis.pcall('ZADD', wake, 'XX', 0, '')) == 'number' then
  clear_past(unique, unique_due, 0)
  clear_past(unique_held, unique_until, HELD_MS)
end
if (tonumber(redis.call('ZSCORE', unique_until, key) or now_ms)) > now_ms then
  holder = redis.call('HGET', unique_held, key)
end
other = redis.call('HGET', unique, key)
local kept = other and bucket_get(messages, other)
if kept and not parts_of(kept) then kept = nil end  -- it was damaged
local at = string.format('%.0f', due_ms)

-- Whether the message that has the key has this id. Its name differs if another message had that id.
local function has_id(its_id)
  return kept and (other == its_id or id_of_field(other) == its_id)
end

if has_id(id) and same(kept, record) then
  bucket_set(messages, other, kept)  -- a write for the sender's WAIT to wait for
  return {'stored', '', 'already', at, ''}
end
if conflict == 'retry' then
  if other == id then forget(unique, unique_due, key) end
  local _, state = place(due:sub(1, 1) == '+')
  if until_end == 1 and (not holder or holder == id) then hold(id, due_ms) end
  return {'stored', '', state, at, ''}
end
if holder and not has_id(holder) and not (replaces == 1 and holder == id) then
  return {holder == id and 'stored' or 'refused', holder == id and '' or holder, 'already', at, ''}
end
if kept and conflict == 'refuse' then return {'refused', other, 'already', at, ''} end
if kept and conflict == 'debounce' then
  push(other, kept)
  if holder then hold(holder, due_ms) end
  return {'pushed', other, 'already', at, ''}
end
local done = 'stored'
if kept then
  tell('cancelled', other, kept, (take(other)))
  done = 'replaced'
end
local stored, state = place(true)
if until_end == 1 then
  hold(id, due_ms)
elseif holder then
  forget(unique_held, unique_until, key)
end
if stored then
  remember(key, stored, due_ms)
else
  forget(unique, unique_due, key)
end
return {done, kept and other or '', state, at, kept or ''}
