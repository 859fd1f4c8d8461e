-- forecast: count messages by due time, by partitions instead of one by one.
-- needs: partitions delayed
-- Counts `limit` partitions from the rank `start` on, whose names and bounds are `found`. Returns how many messages are
-- due before the first edge, from each edge to the next, and from the last edge on.
local function count_by_due(found, edges, limit)
  local counts = {}
  for i = 1, #edges + 1 do counts[i] = 0 end
  local at = 1  -- the current bucket: edges[at] is its end
  for i = 1, math.min(#found / 2, limit) do
    local key = delayed .. found[2 * i - 1]
    local next_bound = tonumber(found[2 * i + 2] or 'inf')
    local total = redis.call('ZCARD', key)
    local seen = 0
    while edges[at] and tonumber(edges[at]) <= tonumber(found[2 * i]) do at = at + 1 end
    local bucket = at
    while edges[bucket] and tonumber(edges[bucket]) < next_bound and seen < total do
      local below = redis.call('ZCOUNT', key, '-inf', '(' .. edges[bucket])
      counts[bucket] = counts[bucket] + below - seen
      seen, bucket = below, bucket + 1
    end
    counts[bucket] = counts[bucket] + total - seen
  end
  return counts
end
