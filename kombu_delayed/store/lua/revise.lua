-- revise: give a delayed message another text, priority and due time; one whose time has come becomes ready.
-- Twice is safe: by then the message is not what it was read as.
local partitions     = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed        = KEYS[2]            -- what the partitions' keys begin with
local messages       = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates     = KEYS[4]            -- HASH id -> how many messages share it
local wake           = KEYS[5]            -- ZSET token -> when to claim
local events         = KEYS[6]            -- STREAM of lifecycle events
local moved          = KEYS[7]            -- ZSET member -> when it came to another place
local ready          = {unpack(KEYS, 8)}  -- LIST per priority step
local now            = ARGV[1]
local partition_size = tonumber(ARGV[2])
local steps          = ARGV[3]
local event_limit    = tonumber(ARGV[4])  -- about so many are kept; 0: none
local member         = ARGV[5]
local expected       = ARGV[6]            -- priority step + due_ms + message, as it was read
local due_ms         = tonumber(ARGV[7])
local record         = ARGV[8]            -- priority step + message, as it is to be
-- include: clock waiting ready backlog events moved expiry
-- returns 1, or 0 where it is not delayed any more or not what was expected; O(log n)
if redis.call('HGET', messages, member) ~= expected then return 0 end
redis.call('ZREM', wake, '')  -- a full server lets a script write that has freed memory first
local before = earliest()
local step, message = record:match('^(.)(.*)$')
tell('rescheduled', member, message, due_ms)
if due_ms <= now_ms then
  take(member)
  redis.call('LPUSH', list_for(step), string.format('{"due_ms":%.0f,', due_ms) .. message:sub(2))
  announce_ready()
  expire_as_noted()
else
  local old_ms = expected:match('^.(%d+)')
  put_off(member, step, old_ms, message, due_ms, partition_size)
  if due_ms ~= tonumber(old_ms) then note_move(member) end
  announce_due(due_ms, before)
end
return 1
