-- revise: give a delayed message another text, priority and due time; one whose time has come becomes ready.
-- Twice is safe: by then the message is not what it was read as.
-- keys: partitions delayed messages duplicates wake events moved ready...
-- arguments: now partition_size:number steps event_limit:number member expected due_ms:number record
--   expected: priority step + due_ms + message, as it was read
--   record: priority step + message, as it is to be
-- include: clock waiting ready buckets backlog events moved expiry
-- returns 1, or 0 where it is not delayed any more or not what was expected; O(log n)
if bucket_get(messages, member) ~= expected then return 0 end
redis.call('ZREM', wake, '')  -- a full server lets a script write that has freed memory first
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
