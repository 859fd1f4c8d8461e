-- ack: forget messages that a consumer is done with, and tell of it.
-- Twice is safe: what is not held any more stays as it is.
local unacked     = KEYS[1]            -- HASH tag -> priority step + message, of this consumer
local events      = KEYS[2]            -- STREAM of lifecycle events
local consumer    = ARGV[1]
local event_limit = tonumber(ARGV[2])  -- about so many are kept; 0: none
local tags        = {unpack(ARGV, 3)}
-- include: events ack
-- returns how many; O(1) a message
return count
