-- replay: give dead letters another try, with their deliveries and retries counted from 0.
-- Idempotent: messages that are no longer dead do not move.
-- keys: partitions delayed messages duplicates wake dead dead_messages dead_reasons events moved ready...
-- arguments: due_ms:number partition_size:number bucket_bytes:number steps event_limit:number wait ids...
--   due_ms: 0: now
--   wait: the new wait of a message that had one
-- include: waiting ready buckets bucket_add earliest backlog events moved of_queue expiry
-- returns how many; O(log n) a message
local before = earliest()
local count = 0
for _, id in ipairs(ids) do
  local record = bucket_get(dead_messages, id)
  if record then
    record = record:gsub(', ?"deliveries": ?%d+}$', '}')
    -- Matches the headers as Celery writes them. Within strings, such as the arguments, quotes are escaped.
    record = record:gsub('("group_index": ?[^,"{}]*, ?"retries": ?)%d+', '%10', 1)
    if without_wait(record) ~= record then record = with_wait(record, wait) end
    if due_ms == 0 or record:sub(2, 2) ~= '{' then
      redis.call('LPUSH', list_for(record:sub(1, 1)), record:sub(2))
    else
      local message = record:gsub('^(.){"due_ms": ?%d+, ?', '%1{')
      note_move(put(id:match('^(.*)\31%d+$') or id, due_ms, message, partition_size, true))
    end
    redis.call('ZREM', dead, id)
    bucket_drop(dead_messages, id)
    bucket_drop(dead_reasons, id)
    tell('replayed', nil, record, due_ms > 0 and due_ms or promoted_ms(record), nil, nil, id)
    count = count + 1
  end
end
if redis.call('EXISTS', unpack(ready)) > 0 then announce_ready() end
local next_ms = earliest()
if next_ms then announce_due(next_ms, before) end
expire_as_noted()
return count
