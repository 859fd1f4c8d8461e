-- overrides: read the overrides of a queue's limits that have not ended. Read-only.
-- keys: gate absent
-- arguments: now
-- include: clock override
-- returns {name, `slots ms burst until JSON`, …}; O(n)
local answer = {}
local found = redis.call('HGETALL', gate .. 'overrides')
for i = 1, #found, 2 do
  if holds_still(found[i + 1]) then
    answer[#answer + 1], answer[#answer + 2] = found[i], found[i + 1]
  end
end
return answer
