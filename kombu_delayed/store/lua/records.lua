-- records: what a hash that is spread over buckets has under some fields.
-- keys: hash
-- arguments: fields...
-- include: buckets
-- returns a value, packed or not, or nil for each; O(fields)
return bucket_read_all(hash, fields)
