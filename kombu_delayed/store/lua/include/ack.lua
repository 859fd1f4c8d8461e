-- ack: delete the messages that a consumer has finished. After events.
-- needs: unacked consumer tags
local records = redis.call('HMGET', unacked, unpack(tags))
local count = redis.call('HDEL', unacked, unpack(tags))
for _, record in ipairs(records) do
  if record then tell_of_held('acked', record, consumer) end
end
