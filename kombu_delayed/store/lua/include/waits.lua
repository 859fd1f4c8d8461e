-- waits: record events for messages that begin to wait for a limit. After gate, limits and events.
-- needs: gate event_limit
local arrived, place_of = {}, {}

local function note_arrival(member, kept, lane)
  if event_limit ~= 0 and #parts_of_lane(lane).uses > 0 then
    arrived[#arrived + 1] = {member = member, kept = kept, lane = lane}
    place_of[member] = #arrived
  end
end

-- The message left at once, without waiting.
local function forget_arrival(member)
  local place = place_of[member]
  if place then arrived[place] = false end
end

-- Each message counts behind the messages of its lane and those that arrived with it. The reason is a limit without
-- capacity for one more message, or else one without capacity for all of them.
local function tell_of_arrivals()
  if #arrived == 0 then return end

  local function readable(text)
    return (text:gsub('%%(%x%x)', function(hex) return string.char(tonumber(hex, 16)) end))
  end

  -- How much of a limit is free for a message with this due time.
  local function free_of(use, due_ms)
    local limit, free = limit_of[use.name], math.huge
    if limit and limit.is_shared then return allowed[use.limit] or free end
    if limit and limit.most > 0 then free = limit.most - in_use(use) end
    if limit and needs_token(limit, due_ms) then
      free = math.min(free, limit.burst - (spent_until(use) - now_ms) / limit.every_ms + 1e-6)
    end
    return free
  end

  local function cost_of(use)
    local limit = limit_of[use.name]
    if not limit or use.passes then return 0 end
    local cost = limit.most > 0 and math.min(use.cost, limit.most) or use.cost
    return limit.every_ms > 0 and math.min(cost, limit.burst) or cost
  end

  -- As `reason_of` in ticket.py.
  local function reason_for(limit)
    local name, key = limit:match('^([^:]*):?(.*)$')
    return 'waits for the limit ' .. readable(name) .. (key ~= '' and ' of ' .. readable(key) or '')
  end

  local left, came, free, asked = {}, {}, {}, {}
  for _, each in ipairs(arrived) do
    if each then
      left[#left + 1] = each
      came[each.lane] = (came[each.lane] or 0) + 1
    end
  end
  for _, each in ipairs(left) do
    local due_ms, before = each.kept:match('^.(%d+)'), 0
    if came[each.lane] then  -- the first of its lane
      before = redis.call('ZCARD', gate .. 'lane:' .. each.lane) - came[each.lane]
      came[each.lane] = nil
    end
    local full, crowded
    for _, use in ipairs(parts_of_lane(each.lane).uses) do
      local limit, cost = use.limit, cost_of(use)
      free[limit] = free[limit] or free_of(use, tonumber(due_ms))
      asked[limit] = (asked[limit] or 0) + cost * (before + 1)
      if cost > free[limit] then
        full = limit
      elseif cost > 0 and asked[limit] > free[limit] then
        crowded = limit
      end
    end
    if full or crowded then
      tell('waiting', nil, each.kept, due_ms, '', deliveries_of(each.kept), each.member, reason_for(full or crowded))
    end
  end
end
