-- renew: renew a consumer's lease in some of its queues, and check the leases of others in all of them.
-- Idempotent.
-- keys: absent keys...
-- arguments: now consumer lease_ms:number idle_ms:number renewed...
--   keys: for each queue: ZSET consumer -> end of its lease; then for each: HASH unacked; then for each: HASH of slots
--   lease_ms: how long the lease lasts from now on in queues where the consumer holds something …
--   idle_ms: … and where it holds nothing
--   renewed: the queues in which to renew it, counted from 1; negative: the queue deletes itself
-- include: clock auto_delete
-- returns {now_ms, earliest end of its leases before this call or 0, earliest end of the leases of others that have not
--   expired or 0, {queues where it was lost}, {queues where it holds nothing}, {queue, consumer, end, … of leases that have
--   expired, or end too late}}
local count = #keys / 3

-- Whether a lease was granted by a clock that was ahead of the present one. Leases of idle consumers are longer, and
-- have half a millisecond at the end to mark them. Names of version 0.1.0 do not end with the length of the lease.
local function ends_late(name, end_ms)
  local length_ms = tonumber(name:match(':%x%x%x%x%x%x%x%x%-(%d+)$'))
  return length_ms and end_ms - now_ms > length_ms * (end_ms % 1 == 0 and 1.1 or 5)
end

local own_ms, next_ms, own, shared, ended = 0, 0, {}, {}, {}

-- The end of the first lease of another consumer. `first` has the first two leases, so one is of another, if there is one.
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

-- The keys of a queue with an expiry stay while a consumer consumes it. A consumer that left may have removed the expiry
-- of `consumers`.
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
  redis.call('ZREM', keys[1], '')  -- a full server accepts writes only after a script has freed memory
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
-- All others are checked if they are few. If there are many, each call checks some, starting at another place.
local looked, from = 0, math.floor(now_ms)
for n = 1, #shared do
  if looked < 500 then looked = looked + 1 + tell(shared[(from + n) % #shared + 1], '(' .. now_ms, '+inf', 1000, ends_late) end
end
return {now_ms, own_ms, next_ms, lost, idle, odd}
