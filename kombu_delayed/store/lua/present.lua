-- present: which of some ids are in a hash.
-- keys: hash
-- arguments: ids...
-- returns their numbers, from 0 on; O(ids)
local found = {}
for i, id in ipairs(ids) do
  if redis.call('HEXISTS', hash, id) == 1 then found[#found + 1] = i - 1 end
end
return found
