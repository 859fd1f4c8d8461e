-- poison: bury messages that were delivered too often instead of returning them.
-- needs: max_deliveries consumer unique_held unique_until
local function id_of(message)
  local readable, content = pcall(cjson.decode, message)
  if not readable or type(content) ~= 'table' then return redis.sha1hex(message) end
  local headers = type(content.headers) == 'table' and content.headers or {}
  local properties = type(content.properties) == 'table' and content.properties or {}
  for _, id in ipairs({headers.id or false, properties.message_id or false, properties.delivery_tag or false}) do
    if (type(id) == 'string' and id ~= '') or (type(id) == 'number' and id ~= 0) then return tostring(id) end
  end
  return redis.sha1hex(message)
end

local buried = {}

local function is_poison(record, deliveries)
  if max_deliveries == 0 or deliveries < max_deliveries then return false end
  local message = record:sub(2)
  local reason = 'delivered ' .. deliveries .. ' times without success'
  buried[#buried + 1] = entomb(id_of(message), record, consumer, deliveries, reason)
  end_unique(record)
  tell_of_held('buried', record, consumer, deliveries, buried[#buried], reason)
  return true
end
