-- park: move messages from unacked to the backlog: a producer that does not know the backlog made them ready before they
-- were due, or a policy lets them wait.
-- Idempotent: messages that are no longer held do not move.
-- keys: partitions delayed messages duplicates wake unacked events moved
-- arguments: partition_size:number bucket_bytes:number event_limit:number consumer wait reason entries...
--   wait: the member of the message that records the wait (or empty)
--   reason: of a policy (or empty)
--   entries: tag, id, due_ms; …
-- include: waiting buckets bucket_add earliest backlog events moved
-- returns how many; O(log n) a message
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local before = earliest()
local first
local parked = 0
for i = 1, #entries, 3 do
  local tag, id, due_ms = entries[i], entries[i + 1], tonumber(entries[i + 2])
  local record = redis.call('HGET', unacked, tag)
  if record then
    if wait ~= '' then record = with_wait(record, wait) end
    local member = put(id, due_ms, record, partition_size, wait ~= '')
    if member then
      note_move(member)
      tell('scheduled', id, record, due_ms, consumer, nil, nil, reason)
    end
    redis.call('HDEL', unacked, tag)
    parked = parked + 1
    if not first or due_ms < first then first = due_ms end
  end
end
if first then announce_due(first, before) end
return parked
