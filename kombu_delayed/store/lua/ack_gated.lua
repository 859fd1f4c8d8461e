-- ack_gated: ack and free in one call: delete finished messages and release slots.
-- Idempotent, like both.
-- keys: unacked events delayed wake gate ready...
-- arguments: consumer event_limit:number steps freed tags...
--   freed: the tags whose slots are released, separated by spaces
-- include: waiting ready gate slots events ack
-- returns how many were acked; O(log n) a message
local ended = {}
for tag in freed:gmatch('%d+') do ended[#ended + 1] = tag end
free(ended)
return count
