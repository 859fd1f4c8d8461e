-- delete: remove the remains of a purged queue, unless messages have arrived since.
-- Idempotent.
-- keys: partitions wake armed events unique unique_due waiting policies ready...
-- arguments: keeps_offered
--   keeps_offered: 1 keeps the policies that a producer offered, because it offers them only once; empty: none are kept
-- returns how many keys were deleted; unacked messages stay with their consumers, dead letters stay
if redis.call('EXISTS', partitions, waiting, unpack(ready)) > 0 then return 0 end
local count = redis.call('DEL', wake, armed, events, unique, unique_due, wake:sub(1, -5) .. 'expires')
if keeps_offered ~= '' and (redis.call('HGET', policies, 'version') or ''):sub(1, 8) == 'offered:' then return count end
return count + redis.call('DEL', policies)
