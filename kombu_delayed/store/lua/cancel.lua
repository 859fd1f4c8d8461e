-- cancel: drop delayed messages.
-- Idempotent: messages that are no longer delayed do not move.
-- keys: partitions delayed messages duplicates unique unique_due unique_held unique_until events
-- arguments: how event_limit:number ids...
--   how: all: all messages that share an id; one: one member; read: as all, and return them; job:name: as all, by a job
-- include: buckets backlog events unique_gone unique_end
-- returns as text how many there were, for each id; with read {member, priority step + due_ms + message, …};
--   O(log n) a message
local dropped, counts = how == 'read' and {}
local job = how:match('^job:(.*)')
if job then together = {} end
for i = 1, #ids do
  local id, count = ids[i], 0
  local highest = how ~= 'one' and tonumber(redis.call('HGET', duplicates, id) or 1) or 1
  for n = highest, 1, -1 do  -- highest first, so that `forget_duplicate` finds the next one at once
    local member = n == 1 and id or id .. '\31' .. n
    local kept = bucket_get(messages, member)
    local due_ms = kept and kept:match('^.(%d+)')
    if due_ms then  -- as `take` does, but each additional function costs a microsecond
      unindex(member, due_ms)
      bucket_drop(messages, member)
      if n > 1 or member:find('\31', 1, true) then
        -- include: forget_duplicate
        forget_duplicate(member)
      end
      count = count + 1
      tell('cancelled', member, kept, due_ms)
      forget_unique(member, kept)
      end_unique(kept)
      if dropped then dropped[#dropped + 1], dropped[#dropped + 2] = member, kept end
    end
  end
  local text = count == 1 and '1' or tostring(count)  -- formatting a number costs as much as a command
  counts = counts and counts .. ' ' .. text or text
end
if job then tell_together(job) end
return dropped or counts
