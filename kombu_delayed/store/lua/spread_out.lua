-- spread_out: move the fields of one large hash, written by older versions, to buckets, step by step.
-- Idempotent.
-- keys: hash absent
-- arguments: bucket_bytes:number cursor count:number
-- include: buckets bucket_add
-- returns the next cursor, '0' at the end; O(count)
if cursor == '0' then
  if bucket_bytes == 0 or redis.call('EXISTS', hash) == 0 or not all_know_buckets(hash) then return '0' end
  local wanted = redis.call('HLEN', hash) * mean_bytes(hash) / bucket_bytes
  if wanted <= 1 then return '0' end
  local layout, last = layout_of(hash), math.ceil(math.log(wanted) / math.log(PER_GENERATION))
  if last > layout.last then set_layout(hash, layout.first, last) end
end
local layout = layouts[hash] or layout_of(hash)
if layout.last == 0 then return '0' end
local page = redis.call('HSCAN', hash, cursor, 'COUNT', count)
for i = 1, #page[2], 2 do
  local field, value = page[2][i], page[2][i + 1]
  redis.call('HSETNX', bucket_name(hash, layout.last, hash_of(field)), field, packed(field, value))
  redis.call('HDEL', hash, field)
end
left_buckets(hash, {hash})
return page[1]
