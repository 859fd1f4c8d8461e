-- forecast: count delayed messages by due time, from the partition index and without reading them.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed    = KEYS[2]            -- what the partitions' keys begin with
local start      = tonumber(ARGV[1])  -- rank of the first partition to look at
local limit      = tonumber(ARGV[2])  -- look at so many
local edges      = {unpack(ARGV, 3)}  -- ms, ascending: the counts are of what is due from one to the next
-- returns {1 if there are more partitions, messages before the first edge, …, from the last edge on}
local names = redis.call('ZRANGE', partitions, start, start + limit, 'WITHSCORES')
local counts = {#names / 2 > limit and 1 or 0}
for i = 1, #edges + 1 do counts[i + 1] = 0 end
local at = 1  -- the bucket that is open: edges[at] is its end

for i = 1, math.min(#names / 2, limit) do
  local key = delayed .. names[2 * i - 1]
  local next_bound = tonumber(names[2 * i + 2] or 'inf')
  local total = redis.call('ZCARD', key)
  local seen = 0
  while edges[at] and tonumber(edges[at]) <= tonumber(names[2 * i]) do at = at + 1 end
  local bucket = at
  while edges[bucket] and tonumber(edges[bucket]) < next_bound and seen < total do
    local below = redis.call('ZCOUNT', key, '-inf', '(' .. edges[bucket])
    counts[bucket + 1] = counts[bucket + 1] + below - seen
    seen, bucket = below, bucket + 1
  end
  counts[bucket + 1] = counts[bucket + 1] + total - seen
end
return counts
