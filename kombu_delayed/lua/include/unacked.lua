-- unacked: messages on their way back from a consumer to the heads of their ready lists.
-- needs: ready steps wake unacked held consumer
local function with_deliveries(message, count)
  local text = message:sub(-1) == '}' and message or message:match('^(.*})%s*$')
  if not text then return message end
  local before = text:match('^(.*), ?"deliveries": ?%d+}$') or text:sub(1, -2)
  return before .. ',"deliveries":' .. count .. '}'
end

-- The lowest tag was delivered first, so it goes back last and is the next to leave. `is_buried`, where
-- given, may take a message out of the way; `event` is what is told of the others.
local function give_back(tags, count, event, is_buried)
  table.sort(tags, function(a, b) return tonumber(a) > tonumber(b) end)
  local returned, is_ready = 0, false
  for _, tag in ipairs(tags) do
    local record = redis.call('HGET', unacked, tag)
    if record then
      local deliveries = deliveries_of(record) + count
      if not (is_buried and is_buried(record, deliveries)) then
        local list = list_for(record:sub(1, 1))
        redis.call('RPUSH', list, with_deliveries(record:sub(2), deliveries))
        tell_of_held(event, record, consumer, deliveries)
        is_ready = true
      end
      redis.call('HDEL', unacked, tag)
      returned = returned + 1
    end
  end
  if is_ready then announce_ready() end
  return returned
end

-- The highest tags first, so that the next call can go on in front of them; returns how many are left.
-- More than one call can sort have been sorted before.
local function give_back_some(limit, count, event, is_buried)
  if redis.call('HLEN', unacked) <= 1000 or redis.call('EXISTS', held) == 0 then
    redis.call('DEL', held)
    local tags = redis.call('HKEYS', unacked)
    table.sort(tags, function(a, b) return tonumber(a) > tonumber(b) end)
    give_back({unpack(tags, 1, math.min(#tags, limit))}, count, event, is_buried)
  else
    local tags = redis.call('ZREVRANGE', held, 0, limit - 1)
    give_back(tags, count, event, is_buried)
    redis.call('ZREM', held, unpack(tags))
  end
  local left = redis.call('HLEN', unacked)
  if left == 0 then redis.call('DEL', held) end
  return left
end
