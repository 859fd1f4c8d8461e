-- total: how many fields a hash that is spread over buckets has.
-- keys: hash absent
-- include: buckets
-- returns a number; O(buckets)
return bucket_total(hash)
