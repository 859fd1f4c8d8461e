-- total: count the fields of a hash that is spread over buckets.
-- keys: hash absent
-- include: buckets
-- returns a number; O(buckets)
return bucket_total(hash)
