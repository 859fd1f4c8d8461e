-- bucket_scan: scan a hash that is spread over buckets, bucket by bucket. After buckets.
-- needs: nothing
-- As HSCAN: returns the next cursor, '0' at the end, and fields and values. A cursor is `generation:number:cursor`,
-- with the number of the bucket in its generation and the cursor within the bucket.
local function bucket_scan(key, cursor, count)
  local generation, number, at = cursor:match('^(%d+):(%d+):(%d+)$')
  generation, number = tonumber(generation or 0), tonumber(number or 0)
  local layout = layout_of(key)
  for _ = 1, 1000 do  -- few buckets are empty, unless the hash was larger before
    local page = redis.call('HSCAN', bucket_name(key, generation, number), at or cursor, 'COUNT', count)
    if page[1] == '0' then
      number, at = number + 1, '0'
      if generation == 0 or number == PER_GENERATION ^ generation then
        number, generation = 0, math.max(generation + 1, layout.first)
      end
      if generation > layout.last then return page end
    else
      at = page[1]
    end
    page[1] = generation .. ':' .. number .. ':' .. at
    if #page[2] > 0 then return page end
    cursor = page[1]
  end
  return {cursor, {}}
end
