-- audit_messages: scan the delayed messages for those that may have no entry in the index.
-- Read-only.
-- keys: partitions delayed messages
-- arguments: cursor count:number
-- include: buckets bucket_scan
-- returns {the next cursor, '0' at the end, messages scanned, bytes read, member, …}; O(count · log n)
local page = bucket_scan(messages, cursor, count)
local answer = {page[1], #page[2] / 2, 0}
for i = 1, #page[2], 2 do
  local member, due_ms = page[2][i], page[2][i + 1]:match('^.(%d+)')
  answer[3] = answer[3] + #page[2][i + 1]
  local name = due_ms and redis.call('ZREVRANGEBYSCORE', partitions, due_ms, '-inf', 'LIMIT', 0, 1)[1]
  local has_entry = name and redis.call('ZSCORE', delayed .. name, member)
  if not (has_entry or redis.call('ZSCORE', delayed .. 'waiting', member)) then answer[#answer + 1] = member end
end
return answer
