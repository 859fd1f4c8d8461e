-- records: what a hash that is spread over buckets has under some fields.
-- keys: hash
-- arguments: fields...
-- include: buckets
-- returns a value or nil for each; O(fields)
return bucket_get_all(hash, fields)
