-- release: put messages that a consumer holds back to the heads of their ready lists, in their order.
-- Twice is safe: what is not held any more stays where it is.
local wake    = KEYS[1]            -- ZSET token -> when to claim
local unacked = KEYS[2]            -- HASH tag -> priority step + message, of this consumer
local ready   = {unpack(KEYS, 3)}  -- LIST per priority step
local steps   = ARGV[1]
local counted = tonumber(ARGV[2])  -- 1: this was an attempt, 0: it never started
local tags    = {unpack(ARGV, 3)}
-- include: ready unacked
-- returns how many; O(log n) a message
return give_back(unacked, tags, counted)
