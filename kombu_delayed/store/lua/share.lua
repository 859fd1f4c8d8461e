-- share: report the slots of a global limit that a consumer has, and take more for queues with messages that wait for
-- them.
-- Idempotent: the same call, or an older one that arrives late, changes nothing. A later one reports all slots again.
-- keys: delayed consumers gate
-- arguments: now consumer leased lease_ms:number number:number limits most:number held wanted...
--   leased: 1: the caller assumes that it has a lease
--   number: of this call; each call has a higher one
--   limits: as in deliver_gated, of this limit alone
--   most: for how many messages to take slots at most
--   held: the slots that the caller has: limit:key slots; …
--   wanted: queue, limit:key, slots of one message, how many messages; …
-- include: clock override gate limits
-- returns {now in ms, [queue, limit:key, for how many messages it got slots, …], [queues whose turn it is, …]};
--   {0} if its lease was lost; O(log n) a slot
local CALLED_MS, LINE_SECONDS, PLACES = 100, 60, 50
local slots_held = gate .. 'slots:' .. consumer
redis.call('ZREM', consumers, '')  -- a full server accepts writes only after a script has freed memory
local lease_end_ms = redis.call('ZSCORE', consumers, consumer)
if lease_end_ms == '0' or (leased == '1' and not lease_end_ms) then return {0} end
local lasts_long = tonumber(lease_end_ms or 0) > now_ms + lease_ms  -- because it held nothing: see renew
if not lasts_long then redis.call('ZADD', consumers, now_ms + lease_ms, consumer) end

-- The slots that the consumer has, as recorded by this script. The empty name has the number of its last call.
local known, freed = {}, {}
local found = redis.call('HGETALL', slots_held)
for i = 1, #found, 2 do known[found[i]] = tonumber(found[i + 1]:match('%d+$')) end
if number <= (known[''] or 0) then return {now_ms, {}, {}} end
redis.call('HSET', slots_held, '', number)
known[''] = nil

local function has(limit, count)
  local more = count - (known[limit] or 0)
  if more == 0 then return end
  known[limit] = count
  if redis.call('HINCRBY', gate .. 'slots', limit, more) <= 0 then redis.call('HDEL', gate .. 'slots', limit) end
  if count > 0 then
    redis.call('HSET', slots_held, limit, '|' .. limit .. '*' .. count)
  else
    redis.call('HDEL', slots_held, limit)
  end
  if more < 0 then freed[limit] = true end
end

local stays = {}
for limit, count in held:gmatch('([^ ;]+) (%d+);') do
  stays[limit] = true
  has(limit, tonumber(count))
end
for i = 1, #found, 2 do
  if known[found[i]] and not stays[found[i]] then has(found[i], 0) end
end

local granted, called = {}, {}

-- The first shard of a queue that wants slots. One shard gets all it wants before the next, so that few claims bring many
-- messages. A consumer lists a shard last after it has claimed from it.
local function next_shard(want)
  while want.shards[want.at].count == 0 do want.at = want.at + 1 end
  return want.shards[want.at]
end

-- Serves the line of queues that wait for a limit and key. A queue in line has the cost of one of its messages, the time
-- when it was called, and a shard to call.
local function serve(limit, wants)
  local line, notes = gate .. 'blocked:' .. limit, gate .. 'called:' .. limit
  local most_slots = limit_of[limit:match('^[^:]*')].most
  local last = tonumber(redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')[2] or 0)
  for queue, want in pairs(wants) do
    last = last + 1
    redis.call('ZADD', line, 'NX', last, queue)
    redis.call('HSET', notes, queue, want.shards[1].cost .. ' 0 ' .. want.shards[1].name)
  end
  local queues = redis.call('ZRANGE', line, 0, PLACES - 1)
  if #queues == 0 then return end
  local free, total = most_slots - in_use({limit = limit}), known[limit] or 0
  local got, served = {}, {}
  local i = 1
  while queues[i] do
    local queue = queues[i]
    local want = wants[queue]
    if want and want.count > 0 and most > 0 then
      local shard = next_shard(want)
      if math.min(shard.cost, most_slots) > free then break end
      free, total, most = free - shard.cost, total + shard.cost, most - 1
      shard.count, want.count = shard.count - 1, want.count - 1
      got[shard.name] = (got[shard.name] or 0) + 1
      served[queue] = true
      queues[#queues + 1] = queue
    elseif not want then
      local cost, called_ms, name = (redis.call('HGET', notes, queue) or '1 0 ' .. queue):match('^(%d+) (%d+) (.*)$')
      cost, called_ms = math.min(tonumber(cost), most_slots), tonumber(called_ms)
      if called_ms > now_ms or (called_ms > 0 and now_ms - called_ms >= CALLED_MS) then  -- no consumer there has capacity
        redis.call('ZREM', line, queue)
        redis.call('HDEL', notes, queue)
      elseif cost > free then
        break
      else
        free = free - cost
        if called_ms == 0 then
          redis.call('HSET', notes, queue, string.format('%d %.0f %s', cost, now_ms, name))
          called[#called + 1] = name
        end
      end
    end
    i = i + 1
  end
  for name, count in pairs(got) do
    granted[#granted + 1], granted[#granted + 2], granted[#granted + 3] = name, limit, count
  end
  has(limit, total)
  for queue, want in pairs(wants) do
    if want.count == 0 then
      redis.call('ZREM', line, queue)
      redis.call('HDEL', notes, queue)
    elseif served[queue] then
      last = last + 1
      redis.call('ZADD', line, last, queue)
    end
  end
  redis.call('EXPIRE', line, LINE_SECONDS)
  redis.call('EXPIRE', notes, LINE_SECONDS)
end

local wants_of = {}
for i = 1, #wanted, 4 do
  local name, limit, cost, count = wanted[i], wanted[i + 1], tonumber(wanted[i + 2]), tonumber(wanted[i + 3])
  local queue = name:match('^(.*)\31%d+$') or name  -- its shards share its turns
  local wants = wants_of[limit] or {}
  local want = wants[queue] or {shards = {}, count = 0, at = 1}
  wants_of[limit], wants[queue], freed[limit] = wants, want, nil
  want.shards[#want.shards + 1] = {name = name, cost = cost, count = count}
  want.count = want.count + count
end
for limit in pairs(freed) do wants_of[limit] = {} end
for limit, wants in pairs(wants_of) do serve(limit, wants) end
return {now_ms, granted, called}
