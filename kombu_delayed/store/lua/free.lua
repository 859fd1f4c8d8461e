-- free: give back the slots of messages whose tasks have ended, or did not begin.
-- Twice is safe: what has no slots any more gives none back.
local delayed  = KEYS[1]            -- what the partitions' keys begin with
local wake     = KEYS[2]            -- ZSET token -> when to claim
local gate     = KEYS[3]            -- what the keys of the gate begin with
local ready    = {unpack(KEYS, 4)}  -- LIST per priority step
local consumer = ARGV[1]
local steps    = ARGV[2]
local tags     = {unpack(ARGV, 3)}
-- include: waiting ready gate slots
-- returns 1; O(log n) a message
free(tags)
return 1
