-- reschedule: give delayed messages another due time. After clock ready backlog events moved expiry unique_gone.
-- needs: now ready steps wake partitions messages partition_size whole
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local before = earliest()
local first
local is_ready = false

-- The first "eta" after "headers" is the header, unless another object begins before it: then nothing changes. The body
-- is a string with escaped quotes. An eta of null stays: the message was delayed in another way.
local function with_eta(message, eta)
  local from = message:find('"headers":', 1, true) or 1
  local _, stop = message:find('"eta": ?', from)
  local _, old_stop = message:find('^"[^"\\]*"', (stop or #message) + 1)
  if eta == '' or not old_stop or (message:find('{"', from + 12, true) or stop) < stop then return message end
  return message:sub(1, stop) .. '"' .. eta .. '"' .. message:sub(old_stop + 1)
end

local function move_to(member, due_ms, eta)
  local kept = bucket_get(messages, member)
  if not kept then return 0 end
  local step, old_ms, message = parts_of(kept)
  if not step then return 0 end
  message = with_eta(without_wait(step .. message):sub(2), eta)
  tell('rescheduled', member, message, due_ms)
  if due_ms <= now_ms then
    take(member)
    forget_unique(member, kept)
    redis.call('LPUSH', list_for(step), string.format('{"due_ms":%.0f,', due_ms) .. message:sub(2))
    is_ready = true
  else
    put_off(member, step, old_ms, message, due_ms, partition_size)
    note_move(member)
    if not first or due_ms < first then first = due_ms end
  end
  return 1
end

-- `due` is in ms since the epoch, or + and ms from now. Returns how many messages of the id were moved.
local function reschedule(id, due, eta)
  local due_ms = tonumber(due)
  if due:sub(1, 1) == '+' then due_ms = now_ms + due_ms end
  local count = 0
  local members = whole == '1' and members_of(id) or {id}
  for n = #members, 1, -1 do  -- highest first, so that `forget_duplicate` finds the next one at once
    count = count + move_to(members[n], due_ms, eta)
  end
  return count
end

local function announce_rescheduled()
  if first then announce_due(first, before) end
  if is_ready then
    announce_ready()
    expire_as_noted()
  end
end
