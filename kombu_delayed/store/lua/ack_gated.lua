-- ack_gated: as ack, and as free: one call for what is acked and for slots that come back.
-- Twice is safe, as of both.
local unacked     = KEYS[1]            -- HASH tag -> priority step + message, of this consumer
local events      = KEYS[2]            -- STREAM of lifecycle events
local delayed     = KEYS[3]            -- what the partitions' keys begin with
local wake        = KEYS[4]            -- ZSET token -> when to claim
local gate        = KEYS[5]            -- what the keys of the gate begin with
local ready       = {unpack(KEYS, 6)}  -- LIST per priority step
local consumer    = ARGV[1]
local event_limit = tonumber(ARGV[2])  -- about so many are kept; 0: none
local steps       = ARGV[3]
local freed       = ARGV[4]            -- the tags whose slots come back, with spaces between them
local tags        = {unpack(ARGV, 5)}
-- include: waiting ready gate slots events ack
-- returns how many were acked; O(log n) a message
local ended = {}
for tag in freed:gmatch('%d+') do ended[#ended + 1] = tag end
free(ended)
return count
