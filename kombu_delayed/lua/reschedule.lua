-- reschedule: give delayed messages another due time; one that has come makes them ready.
-- Twice is safe.
local partitions     = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed        = KEYS[2]            -- what the partitions' keys begin with
local messages       = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates     = KEYS[4]            -- HASH id -> how many messages share it
local wake           = KEYS[5]            -- ZSET token -> when to claim
local events         = KEYS[6]            -- STREAM of lifecycle events
local ready          = {unpack(KEYS, 7)}  -- LIST per priority step
local now            = ARGV[1]
local partition_size = tonumber(ARGV[2])
local steps          = ARGV[3]
local whole          = ARGV[4]            -- 1: an id stands for all messages that share it, 0: for one member
local event_limit    = tonumber(ARGV[5])  -- about so many are kept; 0: none
local entries        = {unpack(ARGV, 6)}  -- id, due_ms (or +delay_ms), eta in ISO 8601 (or empty); …
-- include: clock ready backlog events
-- returns how many were moved, for each id; O(log n) a message
redis.call('ZREM', wake, '')  -- a full server lets a script write that has freed memory first
local before = earliest()
local first
local is_ready = false
local counts = {}

-- The first eta in a message is its header's: in the body, which is text, quotes are escaped. Where that
-- one is null, the message was delayed in another way.
local function with_eta(message, eta)
  local _, stop = message:find('"eta": ?')
  local _, old_stop = message:find('^"[^"\\]*"', (stop or #message) + 1)
  if eta == '' or not old_stop then return message end
  return message:sub(1, stop) .. '"' .. eta .. '"' .. message:sub(old_stop + 1)
end

local function move_to(member, due_ms, eta)
  local kept = redis.call('HGET', messages, member)
  if not kept then return 0 end
  local step, old_ms, message = parts_of(kept)
  if not step then return 0 end
  message = with_eta(message, eta)
  tell('rescheduled', member, message, due_ms)
  if due_ms <= now_ms then
    take(member)
    redis.call('LPUSH', list_for(step), string.format('{"due_ms":%.0f,', due_ms) .. message:sub(2))
    is_ready = true
  else
    put_off(member, step, old_ms, message, due_ms, partition_size)
    if not first or due_ms < first then first = due_ms end
  end
  return 1
end

for i = 1, #entries, 3 do
  local id, due, eta = entries[i], entries[i + 1], entries[i + 2]
  local due_ms = tonumber(due)
  if due:sub(1, 1) == '+' then due_ms = now_ms + due_ms end
  local count = 0
  local members = whole == '1' and members_of(id) or {id}
  for n = #members, 1, -1 do  -- in this order the others that share an id are found at once
    count = count + move_to(members[n], due_ms, eta)
  end
  counts[#counts + 1] = count
end
if first then announce_due(first, before) end
if is_ready then announce_ready() end
return counts
