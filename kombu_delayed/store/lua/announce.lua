-- announce: a consumer passes on what it has been told of: put wake tokens for all that can be claimed,
-- and let another one promise to come at the next due time.
-- Twice is safe.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed    = KEYS[2]            -- what the partitions' keys begin with
local messages   = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates = KEYS[4]            -- HASH id -> how many messages share it
local wake       = KEYS[5]            -- ZSET token -> when to claim
local armed      = KEYS[6]            -- STRING "due_ms consumer": who has promised to claim then
local gate       = KEYS[7]            -- what the keys of the gate begin with
local ready      = {unpack(KEYS, 8)}  -- LIST per priority step
local steps      = ARGV[1]
-- include: waiting ready backlog announce expiry
-- returns 1
redis.call('DEL', armed)  -- also lets a full server accept the rest
announce_all()
expire_as_noted()
return 1
