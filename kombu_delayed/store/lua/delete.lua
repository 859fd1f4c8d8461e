-- delete: remove the remains of a purged queue, unless messages have arrived since.
-- Twice is safe.
-- keys: partitions wake armed events unique unique_due waiting ready...
-- returns how many keys are gone; unacked messages stay their consumers', dead letters stay
if redis.call('EXISTS', partitions, waiting, unpack(ready)) > 0 then return 0 end
return redis.call('DEL', wake, armed, events, unique, unique_due, wake:sub(1, -5) .. 'expires')
