-- ack: messages that a consumer is done with are forgotten, after events.
-- needs: unacked consumer tags
local records = redis.call('HMGET', unacked, unpack(tags))
local count = redis.call('HDEL', unacked, unpack(tags))
for _, record in ipairs(records) do
  if record then tell_of_held('acked', record, consumer) end
end
