-- waits: tells of messages that begin to wait for a limit, after gate limits and events.
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

-- A limit that has no room for so many messages of a lane.
local function limit_without_room(uses, count, due_ms)
  local full
  for _, use in ipairs(uses) do
    local all = {limit = use.limit, name = use.name, cost = use.cost * count, passes = use.passes}
    if not has_room(all, due_ms) then full = use.limit end
  end
  return full
end

-- What a lane waits for whose limits have no room for one more, or not for all that are in its line; as `reason_of`
-- in gate.py.
local function reason_in(lane, due_ms)
  local uses, count = parts_of_lane(lane).uses, redis.call('ZCARD', gate .. 'lane:' .. lane)
  local full = limit_without_room(uses, count, due_ms)
  if full and count > 1 then full = limit_without_room(uses, 1, due_ms) or full end
  if not full then return '' end
  local name, key = full:match('^([^:]+):?(.*)$')
  return 'waits for the limit ' .. readable(name) .. (key ~= '' and ' of ' .. readable(key) or '')
end

local function tell_of_arrivals()
  local reasons = {}
  for _, each in ipairs(arrived) do
    if each then
      local due_ms = each.kept:match('^.(%d+)')
      reasons[each.lane] = reasons[each.lane] or reason_in(each.lane, tonumber(due_ms))
      if reasons[each.lane] ~= '' then
        tell('waiting', nil, each.kept, due_ms, '', deliveries_of(each.kept), each.member, reasons[each.lane])
      end
    end
  end
end
