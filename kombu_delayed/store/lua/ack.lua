-- ack: forget messages that a consumer is done with, and record the events.
-- Twice is safe: messages that are no longer held do not change.
-- keys: unacked events
-- arguments: consumer event_limit:number tags...
-- include: events ack
-- returns how many; O(1) a message
return count
