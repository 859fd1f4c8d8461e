-- drop: delete a message that a policy does not let run, and record the reason.
-- Idempotent for held messages: others do not change.
-- keys: unacked unique_held unique_until events
-- arguments: consumer event_limit:number reason tag record ends:number
--   record: of a message that is not held (or empty: the held one)
--   ends: 0: its task continues elsewhere, as in a retry
-- include: events unique_end
-- returns 1 if there was one; O(1)
if record == '' then record = redis.call('HGET', unacked, tag) end
if not record then return 0 end
redis.call('HDEL', unacked, tag)
if ends == 1 then end_unique(record) end
tell_of_held('dropped', record, consumer, nil, nil, reason)
return 1
