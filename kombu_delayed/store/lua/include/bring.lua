-- bring: move messages to the gate, for deliver_gated, in a branch where some are due or ready. After arrive.
-- needs: partitions messages ready steps version promotions
-- Moves messages from the backlog to the gate. Messages without a ticket go to ready, until a consumer can take them.
local function bring_due()
  local function admit_some(some)
    local read = 0
    for i, kept in ipairs(bucket_get_all(messages, some)) do
      local its_version, _, place, lane = ticket_in(kept or '')
      local due_ms = its_version == version and parts_of_lane(lane) and kept:match('^.(%d+)')
      if due_ms then
        admit(some[i], lane, tonumber(due_ms), place)
        note_arrival(some[i], kept, lane)
      elseif kept then
        local record = promoted(some[i], kept)
        redis.call('LPUSH', list_for(record:sub(1, 1)), record:sub(2))
        bucket_drop(messages, some[i])
        if some[i]:find('\31', 1, true) then forget_duplicate(some[i]) end
      end
      read = read + #(kept or '')
    end
    return read
  end

  local members, more = pop_due(now_ms, math.ceil(promotions / 2), admit_some)
  if more then  -- messages that have just become due need not wait until all earlier ones are at the gate
    for _, member in ipairs(pop_due_last(now_ms, math.floor(promotions / 2), admit_some)) do members[#members + 1] = member end
  end
  if redis.call('EXISTS', partitions .. ':urgent') == 1 then
    -- include: pop_urgent
    more = pop_urgent(members, now_ms, promotions, admit_some)
  end
  if #members > 0 then let_arrive_in_time() end
  return more
end

-- Moves the last messages of a list to the gate, or to the consumer for a ticket, at most `most`. Returns how many are
-- left, and the bytes of the others.
local function move_some(found, step, most)
  local left, read = #found, 0
  while left > 0 do
    local its_version, id, place, lane = ticket_in(found[left])
    if its_version == version and parts_of_lane(lane) then
      local member, kept = admit_new(step, found[left], id, lane, place)
      note_arrival(member, kept, lane)
    elseif has_space(most) then
      hand_out(step .. found[left], '')
    else
      break
    end
    read = read + #found[left]
    left = left - 1
  end
  return left, read
end

-- Moves messages out of ready, about a megabyte at most; returns whether more are left. `most`: as in `move_some`.
local function move_ready(most)
  local room, total = promotions, 0
  for i, list in ipairs(ready) do
    local some, found
    repeat
      some = math.min(room, 8)
      found = some > 0 and redis.call('LRANGE', list, -some, -1) or {}
      local left, read = move_some(found, steps:sub(i, i), most)
      if left < #found then redis.call('RPOP', list, #found - left) end
      if left > 0 then return true end
      total = total + read
      room = total < 2 ^ 20 and room - #found or 0
    until room == 0 or #found < some
    if room == 0 and redis.call('EXISTS', list) == 1 then return true end
  end
  return false
end

local function bring_ready(most)
  local more = move_ready(most)
  let_arrive_in_time()
  return more
end
