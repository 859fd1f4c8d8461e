-- revise: give a delayed message another text, priority and due time; if it is then due it becomes ready.
-- Idempotent: after the first call the message differs from `expected`.
-- keys: partitions delayed messages duplicates wake events moved ready...
-- arguments: now partition_size:number steps event_limit:number member expected due_ms:number record
--   expected: priority step + due_ms + message, as it was read
--   record: the new priority step + message
-- include: clock waiting ready buckets earliest backlog events moved of_queue expiry
-- returns 1, or 0 if it is no longer delayed or differs from `expected`; O(log n)
if bucket_get(messages, member) ~= expected then return 0 end
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local before = earliest()
local step, message = record:match('^(.)(.*)$')
tell('rescheduled', member, message, due_ms)
if due_ms <= now_ms then
  take(member)
  redis.call('LPUSH', list_for(step), string.format('{"due_ms":%.0f,', due_ms) .. message:sub(2))
  announce_ready()
  expire_as_noted()
else
  local old_ms = expected:match('^.(%d+)')
  put_off(member, step, old_ms, message, due_ms, partition_size)
  if due_ms ~= tonumber(old_ms) then note_move(member) end
  announce_due(due_ms, before)
end
return 1
