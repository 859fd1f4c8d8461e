-- scan: read a page of a hash that is spread over buckets. Fields that stay during the scan are returned at least once.
-- keys: hash absent
-- arguments: cursor count:number
-- include: buckets bucket_scan
-- returns {the next cursor, '0' at the end, field, value, …}, values packed or not; O(count)
local page = bucket_scan(hash, cursor, count)
return {page[1], unpack(page[2])}
