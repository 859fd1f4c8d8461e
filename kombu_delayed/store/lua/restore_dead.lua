-- restore_dead: put dead letters back as a backup has them.
-- Idempotent: a letter that is there is kept once.
-- Letters older than the age limit are restored too, so that they can be inspected; the next burial in the queue drops
-- them.
-- keys: dead dead_messages dead_reasons absent
-- arguments: bucket_bytes:number entries...
--   entries: id, time of burial in ms, priority step + message, JSON: why, by whom; …
-- include: buckets bucket_add
-- returns as text: restored, already there; O(log n) a letter
local counts = {0, 0}

local function is_same(kept, record)
  -- include: marks
  return kept == record or kept:find(ZSTD, 1, true) and marks_of(kept) == marks_of(record)
end

local function put_back(member, at_ms, record, note)
  local id, n = member:match('^(.*)\31%d+$') or member, 1
  while not bucket_add(dead_messages, member, record) do
    if is_same(bucket_get(dead_messages, member), record) then return false end
    n = n + 1
    member = id .. '\31' .. n
  end
  if not bucket_add(dead_reasons, member, note) then bucket_set(dead_reasons, member, note) end
  redis.call('ZADD', dead, at_ms, member)
  return true
end

for i = 1, #entries, 4 do
  local which = put_back(entries[i], entries[i + 1], entries[i + 2], entries[i + 3]) and 1 or 2
  counts[which] = counts[which] + 1
end
if counts[1] > 0 then
  if redis.call('PERSIST', dead) == 1 then
    for _, key in ipairs({dead_messages, dead_reasons}) do bucket_persist(key) end
  end
end
return table.concat(counts, ' ')
