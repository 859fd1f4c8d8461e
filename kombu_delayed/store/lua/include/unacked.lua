-- unacked: return messages from a consumer to their ready lists.
-- needs: ready steps wake unacked held consumer
-- Patterns are only tried at the end, because a message may be long. But others may have written any number of digits.
local function with_deliveries(message, count)
  local stop = #message
  while stop > 0 and message:find('^%s', stop) do stop = stop - 1 end
  if message:sub(stop, stop) ~= '}' then return message end
  local text = message:sub(1, stop)
  local from = text:find('^%d+}$', -60) and 1 or -60
  local behind = text:find(', ?"deliveries": ?%d+}$', from) or stop
  return text:sub(1, behind - 1) .. ',"deliveries":' .. count .. '}'
end

-- Returns messages in the order of `tags` with the command `push`. `is_buried`, if given, may bury a message instead;
-- `event` is recorded for the others. Stops after a megabyte, which takes the server some ten milliseconds. Returns how
-- many messages there were, and how many tags were checked.
local function put_back(push, tags, count, event, is_buried)
  local returned, looked_at, bytes, is_ready = 0, 0, 0, false
  for _, tag in ipairs(tags) do
    if bytes >= 2 ^ 20 then break end
    looked_at = looked_at + 1
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
      returned, bytes = returned + 1, bytes + #record
    end
  end
  if is_ready then announce_ready() end
  return returned, looked_at
end

-- The order for the heads of lists: the lowest tag was delivered first, so it goes back last and is the next to leave.
local function highest_first(tags)
  table.sort(tags, function(a, b) return tonumber(a) > tonumber(b) end)
end

-- Returns the messages with the highest tags first, so that the next call can continue in front of them; returns how
-- many are left. If there are more tags than one call can sort, they were sorted before.
local function give_back_some(limit, count, event, is_buried)
  if redis.call('HLEN', unacked) <= 1000 or redis.call('EXISTS', held) == 0 then
    redis.call('DEL', held)
    local tags = redis.call('HKEYS', unacked)
    highest_first(tags)
    put_back('RPUSH', {unpack(tags, 1, math.min(#tags, limit))}, count, event, is_buried)
  else
    local tags = redis.call('ZREVRANGE', held, 0, limit - 1)
    local _, looked_at = put_back('RPUSH', tags, count, event, is_buried)
    redis.call('ZREM', held, unpack(tags, 1, looked_at))
  end
  local left = redis.call('HLEN', unacked)
  if left == 0 then redis.call('DEL', held) end
  return left
end
