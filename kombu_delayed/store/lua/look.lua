-- look: which of many queues have messages for which no consumer has promised to come.
-- Twice is safe: it only reads.
-- keys: queues...
-- arguments: now lists:number
--   queues: of each queue: ZSET partitions, what the partitions' keys begin with, STRING armed, LIST per priority step
--   lists: how many lists each queue has
-- include: clock
-- returns a number for each queue, as one text: 0 to claim from it, -1 if it is empty, else in how many ms its next
-- message is due for which a consumer has promised to come; O(1) a queue
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
