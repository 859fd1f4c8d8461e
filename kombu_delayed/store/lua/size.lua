-- size: count a queue's messages by state.
-- keys: partitions delayed messages ready...
-- arguments: now
-- include: clock buckets
-- returns {ready, due (including those at a gate), delayed (due or not)}; O(partitions that are due)
local count = 0
for _, list in ipairs(ready) do count = count + redis.call('LLEN', list) end
local due = redis.call('ZCARD', delayed .. 'waiting')
for _, name in ipairs(redis.call('ZRANGEBYSCORE', partitions, '-inf', now_ms)) do
  due = due + redis.call('ZCOUNT', delayed .. name, '-inf', now_ms)
end
return {count, due, bucket_total(messages)}
