-- amend: give a ready message another text, place or time.
-- Idempotent: after the first call the message differs from `expected`.
-- keys: list partitions delayed messages duplicates wake events moved ready...
-- arguments: now partition_size:number bucket_bytes:number steps event_limit:number start:number limit:number window:number expected id due record how
--   start, limit: where it was read
--   window: how far it is searched on both sides of that
--   expected: the message as it was read
--   due: ms since the epoch; empty: it stays ready
--   record: the new priority step + message
--   how: stay: in its place; behind: behind the other messages; first: before all others
-- include: clock waiting ready buckets bucket_add earliest backlog events ready_place moved of_queue expiry
-- returns 1, or 0 if it is no longer there; O(limit + window), one comparison for each message between it and the nearer
--   end of the list, and O(log n)
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local places = places_of({expected})
if not places[1] then return 0 end
local step, message = record:match('^(.)(.*)$')
local due_ms = tonumber(due)
tell('rescheduled', id, message, due_ms or promoted_ms(message))
if due_ms and due_ms > now_ms then
  take_out(places, 1)
  local before = earliest()
  local member = put(id, due_ms, record, partition_size, true)
  note_move(member)
  announce_due(due_ms, before)
elseif how == 'stay' then
  redis.call('LSET', list, places[1], message)
else
  take_out(places, 1)
  if how == 'first' then
    redis.call('RPUSH', ready[1], message)
  else
    redis.call('LPUSH', list_for(step), message)
  end
  announce_ready()
  expire_as_noted()
end
return 1
