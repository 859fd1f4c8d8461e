-- limits: how many messages of a key may run at once, and how fast they may start. After clock and gate.
-- needs: gate limits
local limit_of = {}
local minds_lateness = false
-- For global limits, by limit and key: the number of slots that messages of this call may use. See share.
local allowed, has_shared, SHARED_LOOK_MS = {}, false, 1000
for name, most, every_ms, burst, after_ms, shared in limits:gmatch('([^ ;]*) (%S+) (%S+) (%S+) ([^ ;]+)([^;]*);') do
  limit_of[name] = {
    most = tonumber(most), every_ms = tonumber(every_ms), burst = tonumber(burst), after_ms = tonumber(after_ms),
    until_ms = math.huge, is_shared = shared ~= '',
  }
  has_shared = has_shared or shared ~= ''
  minds_lateness = minds_lateness or after_ms ~= '0'
end

-- Numbers set at run time override the declared ones: `slots ms burst until JSON`, with - for the declared number.
local overrides = next(limit_of) and redis.call('HGETALL', gate .. 'overrides') or {}
for i = 1, #overrides, 2 do
  local limit = limit_of[overrides[i]]
  local holds, until_ms = holds_still(overrides[i + 1])
  if limit and holds then
    local most, every_ms, burst = overrides[i + 1]:match('^(%S+) (%S+) (%S+) ')
    limit.until_ms = until_ms > 0 and until_ms or math.huge
    if limit.most > 0 then limit.most = tonumber(most) or limit.most end
    if limit.every_ms > 0 then
      limit.every_ms, limit.burst = tonumber(every_ms) or limit.every_ms, tonumber(burst) or limit.burst
    end
  end
end

local function needs_token(limit, due_ms)
  return limit.every_ms > 0 and (limit.after_ms == 0 or now_ms - due_ms > limit.after_ms)
end

-- Slots in use by limit and key, as read; and those of them that `keep_taken` has to write, because this call took some.
-- Nothing reads the slots of a limit after others of it were freed or taken in the same call.
local used, now_used = {}, {}

local function in_use(use)
  local count = used[use.limit] or tonumber(redis.call('HGET', gate .. 'slots', use.limit) or 0)
  used[use.limit] = count
  return count
end

-- Writes the slots that `take_room` has taken.
local function keep_taken()
  local entries = {}
  for limit in pairs(now_used) do entries[#entries + 1], entries[#entries + 2] = limit, used[limit] end
  in_parts('HSET', gate .. 'slots', entries)
end

-- How long it takes until all tokens are back.
local function fills_in_ms(limit)
  return limit.burst * limit.every_ms
end

local function spend(use, until_ms)
  redis.call('SET', gate .. 'rate:' .. use.limit, string.format('%.3f', until_ms), 'PX', math.max(math.ceil(until_ms - now_ms), 1))
end

-- The time until which the tokens are spent. If it is further away than all tokens last, the clock was set back since.
local function spent_until(use)
  local spent_ms = tonumber(redis.call('GET', gate .. 'rate:' .. use.limit) or 0)
  local most_ms = now_ms + fills_in_ms(limit_of[use.name])
  if spent_ms > most_ms + 1 then
    spent_ms = most_ms
    spend(use, spent_ms)
  end
  return math.max(spent_ms, now_ms)
end

-- Whether a limit has capacity now for a message with this due time; if not, returns when to look again, too.
local function has_room(use, due_ms)
  local limit = limit_of[use.name]
  if not limit or use.passes then return true end
  if limit.is_shared then return (allowed[use.limit] or 0) >= use.cost, now_ms + SHARED_LOOK_MS end
  if limit.most > 0 then
    local cost = math.min(use.cost, limit.most)
    if in_use(use) + cost > limit.most then return false, math.min(now_ms + LOOK_MS, limit.until_ms) end
  end
  if needs_token(limit, due_ms) then
    local cost = math.min(use.cost, limit.burst)
    local next_ms = spent_until(use) + (cost - limit.burst) * limit.every_ms
    if next_ms > now_ms + 0.001 then return false, math.min(math.ceil(next_ms - 0.001), limit.until_ms) end
  end
  return true
end

-- Takes the capacity of one message in all limits of its lane, until `keep_taken` in memory only; returns the slots that
-- must be released later.
local function take_room(uses, due_ms)
  local slots = ''
  for _, use in ipairs(uses) do
    local limit = limit_of[use.name]
    if limit and needs_token(limit, due_ms) then
      spend(use, spent_until(use) + math.min(use.cost, limit.burst) * limit.every_ms)
    end
    if limit and limit.is_shared then
      if not use.passes then allowed[use.limit] = allowed[use.limit] - use.cost end
    elseif limit and limit.most ~= 0 and lease_ms > 0 then
      used[use.limit], now_used[use.limit] = in_use(use) + use.cost, true
      slots = slots .. '|' .. use.limit .. '*' .. use.cost
    end
  end
  return slots
end

-- `some_wait`: whether lanes wait for limits; nil before the first look. `nobody_waits`: limits known to have none.
local some_wait
local nobody_waits = {}

-- The first key that waits for a limit, and the turns it has had; nil if none waits.
local function first_to_wait(limit)
  if not some_wait or nobody_waits[limit] then return nil end
  local key, had = unpack(redis.call('ZRANGE', gate .. 'blocked:' .. limit, 0, 0, 'WITHSCORES'))
  nobody_waits[limit] = not key
  return key, tonumber(had)
end

-- Whether a lane must leave its capacity to a lane that waits for the limit, which comes first and needs more. `had`,
-- `order`: as in `block`.
local function is_for_others(use, due_ms, key, had, order)
  local limit = limit_of[use.name]
  if not limit or use.passes or use.cost == 0 then return false end
  if limit.most <= 0 and not limit.is_shared and not needs_token(limit, due_ms) then return false end
  local first, first_had = first_to_wait(use.limit)
  if first == key then
    local first_order = redis.call('ZRANGE', blocked_line(use.limit, key), 0, 0, 'WITHSCORES')[2]
    return first_order ~= nil and tonumber(first_order) < tonumber(order)
  end
  if not first or had <= first_had then return false end
  read_now()
  return had > now_had
end

-- Lets another lane try that waits for one of these limits: now if there is capacity, or when the next token is due.
local function let_next(uses, but)
  for _, use in ipairs(uses) do
    if use.limit ~= but and first_to_wait(use.limit) then
      local free, look_ms = has_room(use, 0)
      if free then unblock(use.limit) else redis.call('ZADD', gate .. 'looks', 'LT', look_ms, use.limit) end
    end
  end
end

-- Lets a lane wait for a limit. `had` is the place of its key, `order` the place of the lane among those of the key.
-- `is_only`: no other lane of the key has turns. `is_left`: the lane leaves its capacity to the first that waits.
local function block(lane, parts, limit, look_ms, had, order, is_only, is_left)
  redis.call('ZADD', gate .. 'blocked:' .. limit, had, parts.key)
  redis.call('ZADD', blocked_line(limit, parts.key), order, lane)
  close(lane, is_only, parts.key, had)
  redis.call('HSET', gate .. 'lanes', lane, limit)
  redis.call('ZADD', gate .. 'looks', 'LT', look_ms, limit)
  some_wait, nobody_waits[limit] = true, nil
  if is_left then unblock(limit) end
  let_next(parts.uses, limit)
end

local function next_look()
  return tonumber(redis.call('ZRANGE', gate .. 'looks', 0, 0, 'WITHSCORES')[2])
end

-- Corrects the times for looking at these limits if the clock was set back since.
local function look_sooner(looks)
  for i = 1, #looks, 2 do
    local limit = limit_of[looks[i]:match('^[^:]*')]
    local within_ms = math.max(LOOK_MS, limit and fills_in_ms(limit) or 0)
    if tonumber(looks[i + 1]) > now_ms + within_ms + 1 then redis.call('ZADD', gate .. 'looks', now_ms, looks[i]) end
  end
end

-- Looks at limits whose time has come, or at all: the next token is due, or capacity was not reported for long.
local function look(at_all)
  local look_ms = next_look()
  some_wait = look_ms ~= nil
  if not some_wait then return end
  local last = redis.call('ZREVRANGEBYSCORE', gate .. 'looks', '+inf', now_ms + LOOK_MS, 'WITHSCORES', 'LIMIT', 0, 100)
  if #last > 0 then
    look_sooner(last)
    look_ms = next_look()
  end
  if look_ms > now_ms and not at_all then return end
  local until_ms = at_all and '+inf' or now_ms
  for _, limit in ipairs(redis.call('ZRANGEBYSCORE', gate .. 'looks', '-inf', until_ms, 'LIMIT', 0, 100)) do
    redis.call('ZADD', gate .. 'looks', now_ms + LOOK_MS, limit)
    if not unblock(limit) then redis.call('ZREM', gate .. 'looks', limit) end
  end
end
