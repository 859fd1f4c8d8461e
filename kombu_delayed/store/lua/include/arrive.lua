-- arrive: messages that come to the gate. After backlog, gate and limits.
-- needs: gate
-- Arriving messages, by due time; lanes, with the lines and the lowest place of the messages that arrive; the count.
local coming

local function none_come()
  coming = {members = {}, lanes = {}, lines = {}, lowest = {}, count = coming and coming.count or 0}
end

none_come()

-- Lets a message wait whose record is in the backlog under `member`. `let_arrive` puts all of them in line at once.
local function admit(member, lane, due_ms, place)
  coming.count = coming.count + 1
  local at = due_ms + (tonumber(place) or math.min(coming.count, 4095)) / 4096
  local members, line = coming.members, coming.lines[lane]
  members[#members + 1], members[#members + 2] = due_ms, member
  if not line then
    line = {}
    coming.lines[lane], coming.lanes[#coming.lanes + 1] = line, lane
  end
  line[#line + 1], line[#line + 2] = at, member
  coming.lowest[lane] = math.min(coming.lowest[lane] or at, at)
end

-- Puts all admitted messages in line; returns those of their lanes that wait for a limit, each with the limit.
local function let_arrive()
  in_parts('ZADD', waiting, coming.members)
  local new, blocked = {}, {}
  for i, limit in ipairs(in_parts('HMGET', gate .. 'lanes', coming.lanes)) do
    local lane = coming.lanes[i]
    in_parts('ZADD', gate .. 'lane:' .. lane, coming.lines[lane])
    if limit then
      if limit ~= '' then blocked[lane] = limit end
      local parts = parts_of_lane(lane)
      local line = limit == '' and gate .. 'turn:' .. parts.key or blocked_line(limit, parts.key)
      redis.call('ZADD', line, 'XX', 'LT', order_of(parts, coming.lowest[lane]), lane)
    else
      new[#new + 1] = lane
    end
  end
  open_all(new, coming.lowest)
  none_come()
  return blocked
end

-- Lets a message wait that is not in the backlog. Without a due time, it gets the time when it was sent, if it records
-- that, or now. Returns its member and its record in the backlog.
local function admit_new(step, message, id, lane, place)
  if message:byte() ~= 123 then message = message:gsub('^%s+', '') end  -- promotion writes after the {
  local due_ms, behind = message:match('^{"due_ms": ?(%d+), ?()')
  if due_ms then message = '{' .. message:sub(behind) end
  due_ms = tonumber(due_ms or math.min(message:match('^{"wait": ?{"first_due_ms": ?(%d+)') or now_ms, now_ms))
  if id:find('%', 1, true) then
    id = id:gsub('%%(%x%x)', function(hex) return string.char(tonumber(hex, 16)) end)
  end
  local kept = step .. string.format('%.0f', due_ms) .. message
  local member = store(id, kept, true)
  admit(member, lane, due_ms, place)
  return member, kept
end

-- As `let_arrive`, but while late messages wait for a token, a message that is not late may continue.
local function let_arrive_in_time()
  for lane, limit in pairs(let_arrive()) do
    local numbers = limit_of[limit:match('^[^:]*')]
    if numbers and numbers.after_ms > 0 then
      local key = parts_of_lane(lane).key
      leave_line(limit, key, lane, redis.call('ZCARD', gate .. 'blocked:' .. limit) > 1)
      open(lane)
    end
  end
end
