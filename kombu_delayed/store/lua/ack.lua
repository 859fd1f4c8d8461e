-- ack: delete messages that a consumer has finished, and record the events.
-- Idempotent: messages that are no longer held do not change.
-- keys: unacked events
-- arguments: consumer event_limit:number tags...
-- include: events ack
-- returns how many; O(1) a message
return count
