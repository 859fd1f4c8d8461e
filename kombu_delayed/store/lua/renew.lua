-- renew: make a consumer's lease last longer in some of its queues, and look at the leases of others in all of them.
-- Twice is safe.
-- keys: absent keys...
-- arguments: now consumer lease_ms:number idle_ms:number renewed...
--   keys: of each queue: ZSET consumer -> end of its lease; then of each: HASH unacked; then of each: HASH of slots
--   lease_ms: how long the lease lasts from now on where the consumer holds something …
--   idle_ms: … and where it holds nothing
--   renewed: the queues in which to renew it, counted from 1; negative: it deletes itself
-- include: clock auto_delete
-- returns {now_ms, end of the first of its leases to end (before this call), or 0; end of the first of others' to end, or 0;
--   {queues where it was lost}, {queues where it holds nothing}, {queue, consumer, end, … of leases that have ended, or end late}}
local count = #keys / 3

-- Granted by a clock that was ahead of the present one? Where nothing is held leases are longer, and half a millisecond
-- tells them apart. Names of version 0.1.0 do not end with the length of the lease.
local function ends_late(name, end_ms)
  local length_ms = tonumber(name:match(':%x%x%x%x%x%x%x%x%-(%d+)$'))
  return length_ms and end_ms - now_ms > length_ms * (end_ms % 1 == 0 and 1.1 or 5)
end

local own_ms, next_ms, own, shared, ended = 0, 0, {}, {}, {}

-- Of the first two of some consumers, one is another, if there is any: the end of its lease.
local function of_other(first)
  return tonumber(first[first[1] == consumer and 4 or 2])
end

local function note_next(end_ms)
  if end_ms and (next_ms == 0 or end_ms < next_ms) then next_ms = end_ms end
end

for i = 1, count do
  own[i] = tonumber(redis.call('ZSCORE', keys[i], consumer) or nil)
  if own[i] and (own_ms == 0 or own[i] < own_ms) then own_ms = own[i] end
  local end_ms = of_other(redis.call('ZRANGE', keys[i], 0, 1, 'WITHSCORES'))
  if end_ms then shared[#shared + 1] = i end
  if end_ms and end_ms <= now_ms then
    ended[#ended + 1] = i
    end_ms = of_other(redis.call('ZRANGEBYSCORE', keys[i], '(' .. now_ms, '+inf', 'WITHSCORES', 'LIMIT', 0, 2))
  end
  note_next(end_ms)
end

local lost, idle, odd, deletes_itself = {}, {}, {}, {}

for n, i in ipairs(renewed) do
  renewed[n] = math.abs(i)
  deletes_itself[renewed[n]] = tonumber(i) < 0
end

local function holds(queues)
  local held = {}
  for _, i in ipairs(queues) do held[#held + 1], held[#held + 2] = keys[count + i], keys[2 * count + i] end
  return redis.call('EXISTS', unpack(held)) > 0
end

local function of_queue(i, name)
  return keys[i]:sub(1, -#'consumers' - 1) .. name
end

local function some_have(queues, name)
  local some = {}
  for n, i in ipairs(queues) do some[n] = of_queue(i, name) end
  return redis.call('EXISTS', unpack(some)) > 0
end

-- The keys of a queue with an expiry last as long as somebody consumes it. Who left may have taken the expiry of
-- `consumers` away.
local function keep_expiring(i)
  local left_ms = math.max(redis.call('PTTL', keys[i]), redis.call('PTTL', of_queue(i, 'expires')))
  if left_ms < 0 then return end
  if redis.call('PTTL', keys[i]) >= 0 then redis.call('PEXPIRE', keys[i], math.max(left_ms, 10 * lease_ms)) end
  local names = {'granted-by', 'expires', 'unacked:' .. consumer, 'gate:slots', 'gate:slots:' .. consumer}
  for _, name in ipairs(names) do
    redis.call('PEXPIRE', of_queue(i, name), math.max(left_ms, 10 * lease_ms))
  end
end

local function renew(i, holds_some)
  local is_idle = not holds_some or not holds({i})
  local end_ms = now_ms + (is_idle and idle_ms > lease_ms and idle_ms + 0.5 or lease_ms)
  if not own[i] or own[i] == 0 then
    lost[#lost + 1] = i
    return
  end
  redis.call('ZADD', keys[i], end_ms, consumer)
  if deletes_itself[i] then last_while_used(keys[i], not is_idle, lease_ms) end
  if is_idle then idle[#idle + 1] = i end
end

if #renewed > 0 then
  redis.call('ZREM', keys[1], '')  -- a full server lets a script write that has freed memory first
  local holds_some = holds(renewed)
  for _, i in ipairs(renewed) do renew(i, holds_some) end
  if some_have(renewed, 'expires') then
    for _, i in ipairs(renewed) do keep_expiring(i) end
  end
  if some_have(renewed, 'ledgers-until') then
    -- include: past_ledgers
    for _, i in ipairs(renewed) do drop_past_ledgers(of_queue(i, 'ledgers-until')) end
  end
end

local function tell(i, low, high, limit, is_odd)
  local some = redis.call('ZRANGEBYSCORE', keys[i], low, high, 'WITHSCORES', 'LIMIT', 0, limit)
  for n = 1, #some, 2 do
    if some[n] ~= consumer and is_odd(some[n], tonumber(some[n + 1])) then
      odd[#odd + 1], odd[#odd + 2], odd[#odd + 3] = i, some[n], some[n + 1]
    end
  end
  return #some / 2
end

for _, i in ipairs(ended) do tell(i, '-inf', now_ms, 100, function() return true end) end
-- All others are looked at where they are few. Of many, each call looks at some, from another place on.
local looked, from = 0, math.floor(now_ms)
for n = 1, #shared do
  if looked < 500 then looked = looked + 1 + tell(shared[(from + n) % #shared + 1], '(' .. now_ms, '+inf', 1000, ends_late) end
end
return {now_ms, own_ms, next_ms, lost, idle, odd}
