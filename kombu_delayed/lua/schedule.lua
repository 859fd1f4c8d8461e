-- schedule: keep messages in the backlog until they are due; what is due already becomes ready.
-- Twice is safe for a due time: the same message with the same id is kept once.
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
local expires_ms     = tonumber(ARGV[4])  -- of the ready lists; 0: never
local event_limit    = tonumber(ARGV[5])  -- about so many are kept; 0: none
local entries        = {unpack(ARGV, 6)}  -- id, due_ms (or +delay_ms), priority step + message; …
-- include: clock ready backlog events
-- returns {delayed, ready, already there}; O(log n) a message
local before = earliest()
local first
local counts = {0, 0, 0}
for i = 1, #entries, 3 do
  local id, due, record = entries[i], entries[i + 1], entries[i + 2]
  local due_ms = tonumber(due)
  local is_relative = due:sub(1, 1) == '+'
  if is_relative then due_ms = now_ms + due_ms end
  if due_ms <= now_ms then
    local list = list_for(record:sub(1, 1))
    redis.call('LPUSH', list, record:sub(2))
    if expires_ms > 0 then redis.call('PEXPIRE', list, expires_ms) end
    counts[2] = counts[2] + 1
  elseif put(id, due_ms, record, partition_size, is_relative) then
    if not first or due_ms < first then first = due_ms end
    counts[1] = counts[1] + 1
    tell('scheduled', id, record, due_ms)
  else
    counts[3] = counts[3] + 1
  end
end
if first then announce_due(first, before) end
if expires_ms > 0 then redis.call('PEXPIRE', events, expires_ms) end
if counts[2] > 0 then announce_ready() end
return counts
