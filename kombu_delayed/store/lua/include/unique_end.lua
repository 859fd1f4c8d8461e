-- unique_end: release the unique key of a task that ends without having run, if it holds the key until its end.
-- needs: unique_held unique_until
local holds_keys = redis.call('EXISTS', unique_held) == 1

-- `message` may be a record too.
local function end_unique(message)
  if not holds_keys or not message:find('"delayed_until"', 1, true) then return end
  -- include: member_of_part
  local key = member_of_part(message, 'headers', 'delayed_unique')
  if redis.call('HGET', unique_held, key) == member_of_part(message, 'headers', 'id') then
    redis.call('HDEL', unique_held, key)
    redis.call('ZREM', unique_until, key)
  end
end
