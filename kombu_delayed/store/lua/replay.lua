-- replay: give dead letters another try, with their deliveries counted anew.
-- Twice is safe: what is not dead any more stays where it is.
local partitions     = KEYS[1]             -- ZSET partition -> lower bound of its due times
local delayed        = KEYS[2]             -- what the partitions' keys begin with
local messages       = KEYS[3]             -- HASH id -> priority step + due_ms + message
local duplicates     = KEYS[4]             -- HASH id -> how many messages share it
local wake           = KEYS[5]             -- ZSET token -> when to claim
local dead           = KEYS[6]             -- ZSET id -> time of burial
local dead_messages  = KEYS[7]             -- HASH id -> priority step + message
local dead_reasons   = KEYS[8]             -- HASH id -> JSON: why, by whom
local events         = KEYS[9]             -- STREAM of lifecycle events
local moved          = KEYS[10]            -- ZSET member -> when it came to another place
local ready          = {unpack(KEYS, 11)}  -- LIST per priority step
local due_ms         = tonumber(ARGV[1])   -- 0: now
local partition_size = tonumber(ARGV[2])
local steps          = ARGV[3]
local event_limit    = tonumber(ARGV[4])   -- about so many are kept; 0: none
local wait           = ARGV[5]             -- what one that a policy has buried remembers from now on
local ids            = {unpack(ARGV, 6)}
-- include: waiting ready backlog events moved expiry
-- returns how many; O(log n) a message
local before = earliest()
local count = 0
for _, id in ipairs(ids) do
  local record = redis.call('HGET', dead_messages, id)
  if record then
    record = record:gsub(', ?"deliveries": ?%d+}$', '}')
    if without_wait(record) ~= record then record = with_wait(record, wait) end
    if due_ms == 0 or record:sub(2, 2) ~= '{' then
      redis.call('LPUSH', list_for(record:sub(1, 1)), record:sub(2))
    else
      local message = record:gsub('^(.){"due_ms": ?%d+, ?', '%1{')
      note_move(put(id:match('^(.*)\31%d+$') or id, due_ms, message, partition_size, true))
    end
    redis.call('ZREM', dead, id)
    redis.call('HDEL', dead_messages, id)
    redis.call('HDEL', dead_reasons, id)
    tell('replayed', nil, record, due_ms > 0 and due_ms or promoted_ms(record), nil, nil, id)
    count = count + 1
  end
end
if redis.call('EXISTS', unpack(ready)) > 0 then announce_ready() end
local next_ms = earliest()
if next_ms then announce_due(next_ms, before) end
expire_as_noted()
return count
