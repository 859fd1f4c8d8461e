-- waits: tells of messages that begin to wait where a limit may hold them, after gate and events.
-- needs: gate event_limit
local arrived, place_of = {}, {}

local function note_arrival(member, kept, lane)
  if event_limit ~= 0 and #parts_of_lane(lane).uses > 0 then
    arrived[#arrived + 1] = {member = member, kept = kept, lane = lane}
    place_of[member] = #arrived
  end
end

-- It has left at once, and has not waited.
local function forget_arrival(member)
  local place = place_of[member]
  if place then arrived[place] = false end
end

local function readable(text)
  return (text:gsub('%%(%x%x)', function(hex) return string.char(tonumber(hex, 16)) end))
end

-- As `reason_of` in gate.py.
local function reason_in(lane)
  local name, key = (redis.call('HGET', gate .. 'lanes', lane) or ''):match('^([^:]+):?(.*)$')
  if not name then return 'waits for its turn' end
  return 'waits for the limit ' .. readable(name) .. (key ~= '' and ' of ' .. readable(key) or '')
end

local function tell_of_arrivals()
  local reasons = {}
  for _, each in ipairs(arrived) do
    if each then
      reasons[each.lane] = reasons[each.lane] or reason_in(each.lane)
      local due_ms = each.kept:match('^.(%d+)')
      tell('waiting', nil, each.kept, due_ms, '', deliveries_of(each.kept), each.member, reasons[each.lane])
    end
  end
end
