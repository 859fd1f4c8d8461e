-- unacked: messages on their way back from a consumer to their ready lists.
-- needs: ready steps wake unacked held consumer
-- Patterns are only tried at the end, as a message may be long; but others may have written any number of digits.
local function with_deliveries(message, count)
  local stop = #message
  while stop > 0 and message:find('^%s', stop) do stop = stop - 1 end
  if message:sub(stop, stop) ~= '}' then return message end
  local text = message:sub(1, stop)
  local from = text:find('^%d+}$', -60) and 1 or -60
  local behind = text:find(', ?"deliveries": ?%d+}$', from) or stop
  return text:sub(1, behind - 1) .. ',"deliveries":' .. count .. '}'
end

-- In the order of `tags`, to where `push` puts them. `is_buried`, where given, may take a message out of the
-- way; `event` is what is told of the others.
local function put_back(push, tags, count, event, is_buried)
  local returned, is_ready = 0, false
  for _, tag in ipairs(tags) do
    local record = redis.call('HGET', unacked, tag)
    if record then
      local deliveries = deliveries_of(record) + count
      if not (is_buried and is_buried(record, deliveries)) then
        local list = list_for(record:sub(1, 1))
        redis.call(push, list, with_deliveries(record:sub(2), deliveries))
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

-- To the heads: the lowest tag was delivered first, so it goes back last and is the next to leave.
local function give_back(tags, count, event, is_buried)
  table.sort(tags, function(a, b) return tonumber(a) > tonumber(b) end)
  return put_back('RPUSH', tags, count, event, is_buried)
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
