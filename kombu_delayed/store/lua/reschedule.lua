-- reschedule: give delayed messages another due time; one that has come makes them ready.
-- Twice is safe.
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
local whole          = ARGV[4]            -- 1: an id stands for all messages that share it, 0: for one member
local event_limit    = tonumber(ARGV[5])  -- about so many are kept; 0: none
local entries        = {unpack(ARGV, 6)}  -- id, due_ms (or +delay_ms), eta in ISO 8601 (or empty); …
-- include: clock waiting ready backlog events moved expiry reschedule
-- returns as text how many were moved, for each id; O(log n) a message
local counts = {}
for i = 1, #entries, 3 do counts[#counts + 1] = reschedule(entries[i], entries[i + 1], entries[i + 2]) end
announce_rescheduled()
return table.concat(counts, ' ')
