-- deliver: promote due messages, then hand ready messages to one consumer, the most urgent first.
-- Popping and recording are one step, so a killed process leaves each message in one place.
-- Safe to repeat: recover finds the messages that the first call handed out.
-- keys: partitions delayed messages duplicates wake armed consumers unacked events ready...
-- arguments: now consumer leased lease_ms:number want:number tag:number promotions:number waits expires_ms:number declared
-- arguments: most_bytes:number steps event_limit:number
--   leased: 1: the caller assumes that it has a lease
--   lease_ms: 0: take without a lease, nothing will be acked
--   want: how many messages at most; fewer if they are large
--   tag: of the first message; the others count up
--   promotions: how many messages to promote at most
--   most_bytes: of the answer, about: with much larger ones the server would stand still for seconds; one message always fits
--   waits: 1: the caller can come back when the next one is due; 2: it also listens for tokens
--   expires_ms: of the queue; 0: never; -1: never, and the queue deletes itself
--   declared: the version of the caller's policies; empty: it has none
-- include: clock waiting ready of_queue earliest events promise
-- returns {now_ms, next due_ms if the caller must claim then or 0, 1 if more is ready + 2 if messages wait at a gate, or 4 if
--   the declared policies are not the caller's, consumers, step + message, …}, or {0} if the lease was lost. If the queue is
--   or recently was paused, the third has 8 added, and the fifth is the time when the pause ended, or 0
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local lease_end_ms = redis.call('ZSCORE', consumers, consumer)
if lease_end_ms == '0' or (leased == '1' and not lease_end_ms) then return {0} end
local lasts_long = tonumber(lease_end_ms or 0) > now_ms + lease_ms  -- because it held nothing: see renew
if lease_ms > 0 and not lasts_long then redis.call('ZADD', consumers, now_ms + lease_ms, consumer) end

local found = redis.call('EXISTS', delayed .. 'waiting', partitions .. ':urgent', of_queue('policies'), of_queue('paused'))
local pause = found > 0 and redis.call('GET', of_queue('paused'))
local is_paused, until_ms = false, 0
if pause then
  -- include: pause
  found = found - 1
  is_paused, until_ms = is_paused_by(pause)
  if is_paused then want, promotions = 0, 0 else forget_in_a_day(of_queue('paused')) end
end
local urgent = found > 0 and redis.call('ZCARD', partitions .. ':urgent') or 0
local some_wait = false
if declared ~= '' or found > math.min(urgent, 1) then
  -- include: policies
  if has_others() then return refused() end
  some_wait = redis.call('EXISTS', delayed .. 'waiting') == 1
end
local next_ms = earliest()
local batches, more = {}, next_ms ~= nil and next_ms <= now_ms  -- list -> messages promoted to it
if promotions > 0 and (more or (urgent > 0 and not next_ms)) then
  -- include: check_lists buckets backlog
  check_lists()

  local function promote(members)
    local records, read = bucket_take_all(messages, members), 0
    for i, kept in ipairs(records) do
      if kept then
        read = read + #kept
        local list = list_for(kept ~= '' and kept:sub(1, 1) or steps:sub(1, 1))
        local batch = batches[list] or {}
        batches[list] = batch
        local front, forms, from = parts_of_packed(kept)
        if front then
          batch[#batch + 1] = unpacked_behind('{"due_ms":' .. front:sub(2) .. ',', members[i], kept, forms, from)
        else
          local due_ms, behind = kept:match('^.(%d+){()')
          -- A damaged message goes to a consumer, which buries it, and does not stop other messages.
          batch[#batch + 1] = due_ms and '{"due_ms":' .. due_ms .. ',' .. kept:sub(behind) or (kept:gsub('^.?%d*', ''))
        end
      end
    end
    for _, member in ipairs(members) do
      if member:find('\31', 1, true) then
        -- include: forget_duplicate
        forget_duplicate(member)
      end
    end
    return read
  end

  local members
  members, more = pop_due(now_ms, urgent > 1 and math.ceil(promotions / 2) or promotions, promote)
  if urgent > 0 and ((urgent > 1 and #members > 0) or redis.call('EXISTS', partitions) == 0) then
    -- include: pop_urgent
    more = pop_urgent(members, now_ms, promotions, promote)
  end
  next_ms = earliest()
end

local answer = {now_ms, 0, 0, redis.call('ZCARD', consumers)}
local taken, bytes = {}, 0
local function hand_out(step, message)
  local record = step .. message
  answer[#answer + 1] = record
  taken[#taken + 1], taken[#taken + 2] = tag, record
  tag, bytes = tag + 1, bytes + #record
  tell_of_held('delivered', record, consumer)
end

local function room()
  return bytes < most_bytes and want - #taken / 2 or 0
end

-- Hands out from a list while there is room. Takes a few messages at a time, and puts back those for which others,
-- which are large, leave no room.
local function hand_out_ready(list, step)
  while room() > 0 do
    local some = math.min(room(), 8)
    local found = redis.pcall('RPOP', list, some) or {}
    if found.err then return #taken == 0 and found end  -- otherwise a later call returns the error: another program has overwritten the key
    for n, message in ipairs(found) do
      if room() == 0 then
        for left = #found, n, -1 do redis.call('RPUSH', list, found[left]) end
        return
      end
      hand_out(step, message)
    end
    if #found < some then return end
  end
end

for i, list in ipairs(ready) do
  local step, batch = steps:sub(i, i), batches[list]
  local refusal = hand_out_ready(list, step)
  if refusal then return refusal end
  if batch then  -- messages that are handed out at once need not go into the list
    local n = 1
    while batch[n] and room() > 0 do
      hand_out(step, batch[n])
      n = n + 1
    end
    if batch[n] then redis.call('LPUSH', list, unpack(batch, n)) end
  end
  more = more or (room() == 0 and redis.call('EXISTS', list) == 1)
end
if lease_ms > 0 then
  if lasts_long and #taken > 0 then redis.call('ZADD', consumers, now_ms + lease_ms, consumer) end
  for i = 1, #taken, 2000 do redis.call('HSET', unacked, unpack(taken, i, math.min(i + 1999, #taken))) end
end
if is_paused then more, next_ms = false, until_ms > 0 and until_ms or nil end
pass_on(answer, more, #taken > 0, waits ~= '0' and next_ms or nil)
if expires_ms > 0 then
  -- include: expiry
  local kept_ms = expire_as_declared(expires_ms, lease_ms)
  if lease_ms > 0 then
    leases_last_for(consumers, kept_ms)
    last_for(unacked, kept_ms)
  end
elseif lease_ms > 0 and (expires_ms < 0 or redis.call('PTTL', consumers) >= 0 and redis.call('EXISTS', of_queue('expires')) == 0) then
  -- include: auto_delete
  last_while_used(consumers, expires_ms == 0 or redis.call('EXISTS', unacked) > 0, lease_ms)
end
if some_wait then answer[3] = answer[3] + 2 end
if pause then
  answer[3] = answer[3] + 8
  table.insert(answer, 5, is_paused and 0 or until_ms)
end
return answer
