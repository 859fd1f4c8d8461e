-- ack: forget messages that a consumer is done with, and tell of it.
-- Twice is safe: what is not held any more stays as it is.
-- keys: unacked events
-- arguments: consumer event_limit:number tags...
-- include: events ack
-- returns how many; O(1) a message
return count
