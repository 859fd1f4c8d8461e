-- present: which of some ids are in a hash.
local hash = KEYS[1]
local ids  = {unpack(ARGV, 1)}
-- returns their numbers, from 0 on; O(ids)
local found = {}
for i, id in ipairs(ids) do
  if redis.call('HEXISTS', hash, id) == 1 then found[#found + 1] = i - 1 end
end
return found
