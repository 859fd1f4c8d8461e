-- schedule: keep messages in the backlog until they are due; what is due already becomes ready.
-- Twice is safe for a due time: the same message with the same id is kept once.
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
local expires_ms     = tonumber(ARGV[4])  -- of the ready lists; 0: never
local event_limit    = tonumber(ARGV[5])  -- about so many are kept; 0: none
local entries        = {unpack(ARGV, 6)}  -- id, due_ms, priority step + due_ms + message (or +delay_ms, priority step + message); …
-- include: clock waiting ready backlog gather events moved expiry schedule
-- returns as text: delayed, ready, already there; O(log n) a message
for i = 1, #entries, 3 do schedule(entries[i], entries[i + 1], entries[i + 2]) end
announce_scheduled()
return table.concat(counts, ' ')
