-- repair: report what is wrong with entries of the backlog, and repair it.
-- Idempotent: correct entries do not change.
-- keys: partitions delayed messages duplicates wake dead dead_messages dead_reasons
-- arguments: now partition_size:number bucket_bytes:number dead_limit:number dead_age_ms:number fixes entries...
--   entries: partition (or empty: in none), member (or empty: the partition itself); …
-- include: clock waiting buckets bucket_add backlog dead
-- returns for each entry '' if nothing is wrong, or: empty (a partition without members), lost (an entry
--   without its message), unreadable, time (the entry has another due time than the message), misplaced (in
--   another partition than its due time's), orphan (a message without an entry); O(log n) an entry
local function fault_of(name, member)
  if member == '' then
    local is_empty = redis.call('ZSCORE', partitions, name) and redis.call('EXISTS', delayed .. name) == 0
    return is_empty and 'empty' or ''
  end
  local score = name ~= '' and redis.call('ZSCORE', delayed .. name, member)
  local kept = bucket_get(messages, member)
  if not kept then return score and 'lost' or '' end
  local step, due_ms = parts_of(kept)
  if not step then return 'unreadable' end
  local right = redis.call('ZREVRANGEBYSCORE', partitions, due_ms, '-inf', 'LIMIT', 0, 1)[1]
  if score and tonumber(score) ~= tonumber(due_ms) then return 'time' end
  if score and name ~= right then return 'misplaced' end
  local found = right and redis.call('ZSCORE', delayed .. right, member)
  if not found and not score and redis.call('ZSCORE', delayed .. 'waiting', member) then return '' end
  if not found then return 'orphan' end
  return tonumber(found) == tonumber(due_ms) and '' or 'time'
end

local function drop_entry(name, member)
  redis.call('ZREM', delayed .. name, member)
  if redis.call('EXISTS', delayed .. name) == 0 then redis.call('ZREM', partitions, name) end
end

local function put_right(fault, name, member)
  if name ~= '' then drop_entry(name, member) end
  local kept = bucket_get(messages, member)
  if fault == 'unreadable' then
    entomb(member, '0' .. kept, '', 0, 'its record in the backlog cannot be read')
    bucket_drop(messages, member)
    -- include: forget_duplicate
    forget_duplicate(member)
  elseif kept and member ~= '' then
    local _, due_ms = parts_of(kept)
    index(member, tonumber(due_ms), partition_size)
    announce_due(tonumber(due_ms))
  end
end

if fixes == '1' then redis.call('ZREM', wake, '') end  -- a full server accepts writes only after a script has freed memory
local faults = {}
for i = 1, #entries, 2 do
  local name, member = entries[i], entries[i + 1]
  local fault = fault_of(name, member)
  if fixes == '1' and fault ~= '' then put_right(fault, name, member) end
  faults[#faults + 1] = fault
end
return faults
