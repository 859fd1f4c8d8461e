-- delete: remove the remains of a purged queue, unless messages have arrived since.
-- Idempotent.
-- keys: partitions wake armed events unique unique_due waiting ready...
-- returns how many keys were deleted; unacked messages stay with their consumers, dead letters stay
if redis.call('EXISTS', partitions, waiting, unpack(ready)) > 0 then return 0 end
return redis.call('DEL', wake, armed, events, unique, unique_due, wake:sub(1, -5) .. 'expires')
