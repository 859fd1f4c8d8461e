-- look: find which of many queues have messages that no consumer has promised to claim.
-- Read-only.
-- keys: queues...
-- arguments: now lists:number
--   queues: for each queue: ZSET partitions, prefix of the partitions' keys, STRING armed, LIST per priority step
--   lists: the number of lists of each queue
-- include: clock
-- returns a number for each queue, as one text: 0 if it should be claimed from, -1 if it is empty, else the ms until its
--   next message is due, which a consumer has promised to claim; O(1) a queue
local answer = {}
for i = 1, #queues, 3 + lists do
  local partitions, delayed, armed = queues[i], queues[i + 1], queues[i + 2]
  local left_ms = 0
  if redis.call('EXISTS', delayed .. 'waiting', unpack(queues, i + 3, i + 2 + lists)) == 0 then
    local first = redis.call('ZRANGE', partitions, 0, 0)[1]
    local due_ms = first and tonumber(redis.call('ZRANGE', delayed .. first, 0, 0, 'WITHSCORES')[2] or 0)
    local promised_ms = due_ms and tonumber((redis.call('GET', armed) or ''):match('^%d+') or 0)
    if not first then
      left_ms = -1
    elseif promised_ms > now_ms and promised_ms <= due_ms then
      left_ms = promised_ms - now_ms
    end
  end
  answer[#answer + 1] = string.format('%.0f', left_ms)
end
return table.concat(answer, ' ')
