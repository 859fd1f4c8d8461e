-- bucket_scan: a hash that is spread over buckets is looked through, bucket by bucket: a split moves fields only to
-- buckets that come later. After buckets.
-- needs: nothing
-- As HSCAN: the next cursor, '0' at the end, and fields and values.
local function bucket_scan(key, cursor, count)
  local number, at = cursor:match('^(%d+):(%d+)$')
  number, at = tonumber(number or 0), at or cursor
  local page = redis.call('HSCAN', bucket_name(key, number), at, 'COUNT', count)
  local total = read_bucket_count(key).number
  if page[1] ~= '0' then
    if number > 0 then page[1] = number .. ':' .. page[1] end
  elseif number + 1 < total then
    page[1] = number + 1 .. ':0'
  end
  return page
end
