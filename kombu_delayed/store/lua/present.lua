-- present: find which ids are in a hash that is spread over buckets.
-- keys: hash absent
-- arguments: ids...
-- include: buckets
-- returns their positions among the ids, from 0 on; O(ids)
local found = {}
for i, id in ipairs(ids) do
  if bucket_has(hash, id) then found[#found + 1] = i - 1 end
end
return found
