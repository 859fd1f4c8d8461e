-- total: how many fields a hash that is spread over buckets has.
-- keys: hash
-- include: buckets
-- returns a number; O(buckets)
return bucket_total(hash)
