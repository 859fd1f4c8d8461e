-- size: count a queue's messages by state, a part of them in each call, which others need not wait for.
-- keys: partitions delayed messages ready...
-- arguments: now place:number bucket:number limit:number
--   place, bucket: where to go on among the partitions that are due, and among the buckets: 0 at first, -1 for not at all
--   limit: how many partitions and buckets to count
-- include: clock buckets
-- returns {ready, due (including those at a gate), delayed (due or not), the next place and bucket}; O(place + limit)
local count, due, total = 0, 0, 0
if place == 0 then
  for _, list in ipairs(ready) do count = count + redis.call('LLEN', list) end
  due = redis.call('ZCARD', delayed .. 'waiting')
end
if place >= 0 then
  local names = redis.call('ZRANGEBYSCORE', partitions, '-inf', now_ms, 'LIMIT', place, limit)
  for _, name in ipairs(names) do due = due + redis.call('ZCOUNT', delayed .. name, '-inf', now_ms) end
  place = #names == limit and place + limit or -1
end
if bucket >= 0 then total, bucket = bucket_total(messages, bucket, limit) end
return {count, due, total, place, bucket}
