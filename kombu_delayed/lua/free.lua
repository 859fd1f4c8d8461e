-- free: give back the slots of messages whose tasks have ended, or did not begin.
-- Twice is safe: what has no slots any more gives none back.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed    = KEYS[2]            -- what the partitions' keys begin with
local messages   = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates = KEYS[4]            -- HASH id -> how many messages share it
local wake       = KEYS[5]            -- ZSET token -> when to claim
local gate       = KEYS[6]            -- what the keys of the gate begin with
local ready      = {unpack(KEYS, 7)}  -- LIST per priority step
local now        = ARGV[1]
local consumer   = ARGV[2]
local steps      = ARGV[3]
local tags       = {unpack(ARGV, 4)}
-- include: clock waiting ready backlog gate slots
-- returns 1; O(log n) a message
redis.call('HDEL', slots_held, '')    -- a full server lets a script write that has freed memory first
free(tags)
return 1
