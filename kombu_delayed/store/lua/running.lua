-- running: read the messages that have slots at a gate, whether they were acked or not.
-- Read-only.
-- keys: consumers gate
-- arguments: limit:number
--   limit: how many messages at most, and of how many consumers
-- returns {consumer, id@ms since the epoch|limit*cost|…, …}, without the part before the first | if it is not known;
--   O(limit)
local answer = {}
for _, consumer in ipairs(redis.call('ZRANGE', consumers, 0, limit - 1)) do
  local found = redis.call('HSCAN', gate .. 'slots:' .. consumer, 0, 'COUNT', limit)[2]
  for i = 2, #found, 2 do
    if #answer >= 2 * limit then return answer end
    answer[#answer + 1], answer[#answer + 2] = consumer, found[i]
  end
end
return answer
