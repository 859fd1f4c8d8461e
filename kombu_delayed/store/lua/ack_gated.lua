-- ack_gated: as ack, and as free: one call for what is acked and for slots that come back.
-- Twice is safe, as of both.
-- keys: unacked events delayed wake gate ready...
-- arguments: consumer event_limit:number steps freed tags...
--   freed: the tags whose slots come back, with spaces between them
-- include: waiting ready gate slots events ack
-- returns how many were acked; O(log n) a message
local ended = {}
for tag in freed:gmatch('%d+') do ended[#ended + 1] = tag end
free(ended)
return count
