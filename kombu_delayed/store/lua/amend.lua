-- amend: give a ready message another text, place or time.
-- Twice is safe: by then the message is not what it was read as.
-- keys: list partitions delayed messages duplicates wake events moved ready...
-- arguments: now partition_size:number bucket_bytes:number steps event_limit:number start:number limit:number window:number expected id due record how
--   start, limit: where it was read; it is looked for so far on both sides of that, too: window
--   expected: the message as it was read
--   due: ms since the epoch; empty: it stays ready
--   record: priority step + message, as it is to be
--   how: stay: in its place; behind: behind what waits; first: the next one of all
-- include: clock waiting ready buckets bucket_add backlog events ready_place moved expiry
-- returns 1, or 0 where it is not there any more; O(limit + window), one comparison for each message between it and the nearer
-- end of the list, and O(log n)
redis.call('ZREM', wake, '')  -- a full server lets a script write that has freed memory first
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
