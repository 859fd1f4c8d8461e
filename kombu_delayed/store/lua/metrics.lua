-- metrics: metrics of a queue for autoscalers. Read-only.
-- keys: partitions delayed messages unacked consumers dead paused ready...
-- arguments: now limit:number spans...
--   unacked: prefix of the keys of consumers' unacked hashes
--   limit: how many partitions to count, and how many buckets of a generation; the rest is estimated
--   spans: ms from now, ascending
-- include: clock buckets forecast
-- returns {delayed, due, waiting at the gate, ready, unacked, dead, consumers with a lease, ms since the oldest message
--   without a consumer was due or -1, ms until the next one is due or -1, 1 if counts are estimated, ms since the oldest
--   message at the gate was due or -1, 1 if the queue is paused, due within the first span, …}. After a pause, lateness
--   counts from its end; O(limit + consumers + log n)
local pause = redis.call('GET', paused)
local is_paused, resumed_ms = false, 0
if pause then
  -- include: pause
  is_paused, resumed_ms = is_paused_by(pause)
end
local edges = {string.format('%.0f', now_ms + 1)}
for i, span in ipairs(spans) do edges[i + 1] = string.format('%.0f', now_ms + 1 + span) end

local function partitions_before(edge)
  return redis.call('ZCOUNT', partitions, '-inf', '(' .. edge)
end

-- The messages due before each edge. All partitions that are not counted are assumed to be equally full.
local function due_before_edges(total)
  local last = partitions_before(edges[#edges])
  local looked_at = math.min(last, limit)
  local found = redis.call('ZRANGE', partitions, 0, looked_at, 'WITHSCORES')
  local counts = count_by_due(found, edges, looked_at)
  local seen = 0
  for _, count in ipairs(counts) do seen = seen + count end
  local rest = redis.call('ZCARD', partitions) - looked_at
  local mean = rest > 0 and math.max(total - seen, 0) / rest or 0
  local before, exact = {}, 0
  for i, edge in ipairs(edges) do
    local skipped = math.max(partitions_before(edge) - looked_at, 0)
    exact = exact + counts[i]
    before[i] = math.floor(exact + skipped * mean + 0.5)
  end
  return before, last > limit and 1 or 0
end

local function first_due(name, from)
  return name and tonumber(redis.call('ZRANGEBYSCORE', delayed .. name, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
end

local function oldest_age_ms()
  local first = first_due(redis.call('ZRANGE', partitions, 0, 0)[1], '-inf') or now_ms + 1
  first = math.min(first, first_due('waiting', '-inf') or first)
  for _, list in ipairs(ready) do
    local head = redis.call('LINDEX', list, -1) or ''
    first = math.min(first, tonumber(head:match('^{"due_ms":(%d+)')) or first)
  end
  first = math.max(first, resumed_ms)
  return not is_paused and first <= now_ms and now_ms - first or -1
end

local function next_ms()
  local within = redis.call('ZREVRANGEBYSCORE', partitions, now_ms, '-inf', 'LIMIT', 0, 1)[1]
  local behind = redis.call('ZRANGEBYSCORE', partitions, '(' .. now_ms, '+inf', 'LIMIT', 0, 1)[1]
  local due_ms = first_due(within, '(' .. now_ms) or first_due(behind, '-inf')
  return due_ms and due_ms - now_ms or -1
end

local function waiting_age_ms()
  local first = first_due('waiting', '-inf')
  return first and not is_paused and math.max(now_ms - math.max(first, resumed_ms), 0) or -1
end

-- How many messages there are, and whether that is an estimate. They are spread evenly over the buckets of a generation.
local function about_total()
  local layout, total, is_estimate = layout_of(messages), redis.call('HLEN', messages), false
  for g = math.max(layout.first, 1), layout.last do
    local size, count, found = PER_GENERATION ^ g, 0, 0
    local step = math.ceil(size / limit)
    for number = size, 2 * size - 1, step do
      count, found = count + 1, found + redis.call('HLEN', messages .. ':' .. number)
    end
    total, is_estimate = total + math.floor(found * size / count + 0.5), is_estimate or step > 1
  end
  return total, is_estimate
end

local total, is_estimate = about_total()
local before, estimated = due_before_edges(total - redis.call('ZCARD', delayed .. 'waiting'))
local waiting, held = 0, 0
for _, list in ipairs(ready) do waiting = waiting + redis.call('LLEN', list) end
for _, consumer in ipairs(redis.call('ZRANGE', consumers, 0, -1)) do
  held = held + redis.call('HLEN', unacked .. consumer)
end
local buried, lasting = redis.call('ZCARD', dead), redis.call('ZCOUNT', consumers, '(' .. now_ms, '+inf')
local at_gate = redis.call('ZCARD', delayed .. 'waiting')
if is_estimate then total, estimated = math.max(total, before[#before] + at_gate), 1 end
local answer = {
  total, before[1] + at_gate, at_gate, waiting, held, buried, lasting, oldest_age_ms(), next_ms(), estimated,
  waiting_age_ms(), is_paused and 1 or 0,
}
for i = 2, #before do answer[#answer + 1] = before[i] - before[1] end
return answer
