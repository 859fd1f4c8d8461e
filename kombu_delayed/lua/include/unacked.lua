-- unacked: messages on their way back from a consumer to the heads of their ready lists.
-- needs: ready steps wake
local function bump(message, count)
  local before, deliveries = message:match('^(.*),"deliveries":(%d+)}$')
  if before then return before .. ',"deliveries":' .. (deliveries + count) .. '}' end
  if message:sub(-1) ~= '}' then return message end
  return message:sub(1, -2) .. ',"deliveries":' .. count .. '}'
end

-- The lowest tag was delivered first, so it goes back last and is the next to leave.
local function give_back(unacked, tags, count)
  table.sort(tags, function(a, b) return tonumber(a) > tonumber(b) end)
  local returned = 0
  for _, tag in ipairs(tags) do
    local record = redis.call('HGET', unacked, tag)
    if record then
      redis.call('RPUSH', list_for(record:sub(1, 1)), bump(record:sub(2), count))
      redis.call('HDEL', unacked, tag)
      returned = returned + 1
    end
  end
  if returned > 0 then announce_ready() end
  return returned
end

-- The highest tags first, so that the next call can go on in front of them.
local function give_back_some(unacked, limit, count)
  local tags = redis.call('HKEYS', unacked)
  table.sort(tags, function(a, b) return tonumber(a) > tonumber(b) end)
  give_back(unacked, {unpack(tags, 1, math.min(#tags, limit))}, count)
  return math.max(#tags - limit, 0)
end
