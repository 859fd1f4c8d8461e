-- slots: release the slots of messages. After waiting, ready and gate.
-- needs: gate wake consumer
local slots_held = gate .. 'slots:' .. consumer

local function free(tags)
  local done, freed, costs, limits, has_opened, some_wait = {}, {}, {}, {}, false, nil
  for i, slots in ipairs(redis.call('HMGET', slots_held, unpack(tags))) do
    if slots and not done[tags[i]] then  -- a tag may be listed twice
      done[tags[i]], freed[#freed + 1] = true, tags[i]
      for limit, cost in slots:gmatch('|([^|*]+)%*(%d+)') do
        if not costs[limit] then limits[#limits + 1] = limit end
        costs[limit] = (costs[limit] or 0) + cost
        if some_wait == nil then some_wait = redis.call('EXISTS', gate .. 'looks') == 1 end
        has_opened = (some_wait and unblock(limit)) or has_opened
      end
    end
  end
  local left, empty = {}, {}
  for i, count in ipairs(in_parts('HMGET', gate .. 'slots', limits)) do
    local limit = limits[i]
    local still = tonumber(count or 0) - costs[limit]
    if still > 0 then
      left[#left + 1], left[#left + 2] = limit, still
    else
      empty[#empty + 1] = limit
    end
  end
  in_parts('HSET', gate .. 'slots', left)
  in_parts('HDEL', gate .. 'slots', empty)
  in_parts('HDEL', slots_held, freed)
  if has_opened then announce_ready() end
end

-- Releases the slots of at most `limit` messages of the consumer, but not of the tags in `but`; returns how many are left.
local function free_some(limit, but)
  if redis.call('EXISTS', slots_held) == 0 then return 0 end
  local stays, tags = {}, {}
  for _, tag in ipairs(but) do stays[tag] = true end
  for _, tag in ipairs(redis.call('HKEYS', slots_held)) do
    if not stays[tag] then tags[#tags + 1] = tag end
  end
  if #tags > 0 then free({unpack(tags, 1, math.min(#tags, limit))}) end
  return math.max(#tags - limit, 0)
end
