-- scan: a page of a hash that is spread over buckets. What stays meanwhile is met, some of it more than once.
-- keys: hash
-- arguments: cursor count:number
-- include: buckets bucket_scan
-- returns {the next cursor, '0' at the end, field, value, …}; O(count)
local page = bucket_scan(hash, cursor, count)
for i = 1, #page[2], 2 do page[2][i + 1] = unpacked(page[2][i], page[2][i + 1]) end
return {page[1], unpack(page[2])}
