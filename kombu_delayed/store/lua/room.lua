-- room: read how much of some limits is in use. Read-only.
-- keys: gate absent
-- arguments: now limits...
--   limits: as in the names of slots
-- include: clock
-- returns {now in ms, slots in use, until when tokens are spent, …}; O(1) a limit
local answer = {now_ms}
for _, limit in ipairs(limits) do
  answer[#answer + 1] = tonumber(redis.call('HGET', gate .. 'slots', limit) or 0)
  answer[#answer + 1] = redis.call('GET', gate .. 'rate:' .. limit) or '0'
end
return answer
