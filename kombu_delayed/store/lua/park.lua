-- park: move messages from unacked to the backlog: a producer that knows no backlog made them ready
-- before they were due, or a policy lets them wait.
-- Twice is safe: what is not held any more stays where it is.
local partitions     = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed        = KEYS[2]            -- what the partitions' keys begin with
local messages       = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates     = KEYS[4]            -- HASH id -> how many messages share it
local wake           = KEYS[5]            -- ZSET token -> when to claim
local unacked        = KEYS[6]            -- HASH tag -> priority step + message, of this consumer
local events         = KEYS[7]            -- STREAM of lifecycle events
local moved          = KEYS[8]            -- ZSET member -> when it came to another place
local partition_size = tonumber(ARGV[1])
local event_limit    = tonumber(ARGV[2])  -- about so many are kept; 0: none
local consumer       = ARGV[3]
local wait           = ARGV[4]            -- member of the message that remembers the wait (or empty)
local reason         = ARGV[5]            -- of a policy (or empty)
local entries        = {unpack(ARGV, 6)}  -- tag, id, due_ms; …
-- include: waiting backlog events moved
-- returns how many; O(log n) a message
redis.call('ZREM', wake, '')  -- a full server lets a script write that has freed memory first
local before = earliest()
local first
local parked = 0
for i = 1, #entries, 3 do
  local tag, id, due_ms = entries[i], entries[i + 1], tonumber(entries[i + 2])
  local record = redis.call('HGET', unacked, tag)
  if record then
    if wait ~= '' then record = with_wait(record, wait) end
    local member = put(id, due_ms, record, partition_size, wait ~= '')
    if member then
      note_move(member)
      tell('scheduled', id, record, due_ms, consumer, nil, nil, reason)
    end
    redis.call('HDEL', unacked, tag)
    parked = parked + 1
    if not first or due_ms < first then first = due_ms end
  end
end
if first then announce_due(first, before) end
return parked
