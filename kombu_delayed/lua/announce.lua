-- announce: a consumer passes on what it has been told of: put wake tokens for all that can be claimed.
-- Twice is safe.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed    = KEYS[2]            -- what the partitions' keys begin with
local messages   = KEYS[3]            -- HASH id -> priority step + message
local duplicates = KEYS[4]            -- HASH id -> how many messages share it
local wake       = KEYS[5]            -- ZSET token -> when to claim
local ready      = {unpack(KEYS, 6)}  -- LIST per priority step
local steps      = ARGV[1]
-- include: ready backlog
-- returns 1
if redis.call('EXISTS', unpack(ready)) > 0 then announce_ready() end
local next_ms = earliest()
if next_ms then announce_due(next_ms) end
return 1
