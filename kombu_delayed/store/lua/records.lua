-- records: read the values of some fields of a hash that is spread over buckets.
-- keys: hash absent
-- arguments: fields...
-- include: buckets
-- returns a value, packed or not, or nil for each; O(fields)
return bucket_read_all(hash, fields)
