-- deliver_gated: as deliver, for a queue with turns or limits: due and ready messages wait at a gate, and leave it when
-- it is their turn and there is capacity. A message without a ticket of this version goes to the consumer, which writes
-- one.
-- Safe to repeat: recover finds the messages that the first call handed out.
-- keys: partitions delayed messages duplicates wake armed consumers unacked events gate ready...
-- arguments: now bucket_bytes:number consumer leased lease_ms:number want:number tag:number promotions:number waits expires_ms:number
-- arguments: most_bytes:number steps event_limit:number declared version limits taken
--   leased: 1: the caller assumes that it has a lease
--   lease_ms: 0: take without a lease, so nothing will be acked, and messages take no slots
--   want: how many messages at most; fewer if they are large
--   tag: of the first message; the others count up
--   promotions: how many messages to bring to the gate at most
--   most_bytes: as in deliver
--   waits: 1: the caller can come back when the next one is due; 2: it also listens for tokens
--   declared: the version of the caller's policies; empty: it has none
--   version: of the tickets; empty: there are no policies any more, so waiting messages are let out
--   limits: name, slots (0: no limit, -1: counted only), ms per token (0: no limit), burst, lateness in ms up to which no
--     token is needed; … and a last word if the limit is global
--   taken: the slots of global limits that the caller has for the messages it gets: limit:key slots; …
--   expires_ms: of the queue; 0: never; -1: never, and the queue deletes itself
-- include: clock waiting ready of_queue earliest buckets events promise gate override limits waits
-- returns as deliver; if flag 16 is set, also the messages that wait for global limits: limit:key, slots of one message,
--   minimum number of messages; …; O(log n) a message
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local lease_end_ms = redis.call('ZSCORE', consumers, consumer)
if lease_end_ms == '0' or (leased == '1' and not lease_end_ms) then return {0} end
local lasts_long = tonumber(lease_end_ms or 0) > now_ms + lease_ms  -- because it held nothing: see renew
if lease_ms > 0 and not lasts_long then redis.call('ZADD', consumers, now_ms + lease_ms, consumer) end
-- include: policies
if has_others() then return refused() end

for limit, count in taken:gmatch('([^ ;]+) (%d+);') do allowed[limit] = tonumber(count) end
local answer = {now_ms, 0, 0, redis.call('ZCARD', consumers)}
local taken, held, gone, bytes = {}, {}, {}, 0

local function hand_out(record, slots)
  answer[#answer + 1] = record
  taken[#taken + 1], taken[#taken + 2] = tag, record
  if slots ~= '' then held[#held + 1], held[#held + 2] = tag, slots end
  tag, bytes = tag + 1, bytes + #record
  tell_of_held('delivered', record, consumer)
end

-- Whether the answer has space for another message, if `most` of those that are wanted may be of its kind.
local function has_space(most)
  return #taken / 2 < most and bytes < most_bytes * most / want
end

-- The record of a message that leaves the backlog, where its members begin behind the due time, and the due time.
local function promoted(member, kept)
  local front, forms, from = parts_of_packed(kept)
  local step, due_ms, behind = (front or kept):match('^(.)(%d+).?()')
  if not step then return '0' .. unpacked(member, kept):gsub('^.?%d*', '') end  -- damaged: its consumer buries it
  local head = step .. '{"due_ms":' .. due_ms .. ','
  local record = front and unpacked_behind(head, member, kept, forms, from) or head .. kept:sub(behind)
  return record, #head + 1, tonumber(due_ms)
end

-- A call that has handed out from the gate brings no more messages there, so all records are dropped at its end.
local function forget_record(member)
  if member:find('\31', 1, true) then
    -- include: forget_duplicate
    bucket_drop(messages, member)
    forget_duplicate(member)
  else
    gone[#gone + 1] = member
  end
end

-- Takes the first message out of a lane or, with `from_ms`, the first one due from then on. Returns its member, and the
-- place of the message that is first after that.
local function take_from(line, from_ms)
  if not from_ms then
    local found = redis.call('ZRANGE', line, 0, 1, 'WITHSCORES')  -- ZPOPMIN and ZREM are slower in a long line
    if found[1] then redis.call('ZREMRANGEBYRANK', line, 0, 0) end
    return found[1], found[4]
  end
  local member = redis.call('ZRANGEBYSCORE', line, from_ms, '+inf', 'LIMIT', 0, 1)[1]
  if member then redis.call('ZREM', line, member) end
  return member, redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2]
end

-- Takes the first message of a lane that was not cancelled or moved since it arrived. Returns the place of the one
-- behind it, its record, its due time, and whether its ticket has this version. `from_ms`: as in `take_from`.
local function next_of(lane, from_ms)
  while true do
    local member, head = take_from(gate .. 'lane:' .. lane, from_ms)
    if not member then return head end
    local record, from, due_ms = promoted(member, bucket_look(messages, member) or '')
    local its_version, _, _, its_lane = ticket_in(record, from)
    if its_lane == lane and redis.call('ZREM', waiting, member) == 1 then
      forget_record(member)
      forget_arrival(member)
      return head, record, due_ms, its_version == version
    end
  end
end

local has_served = false

-- Removes the entries of global limits for which no lane waits any more.
local function forget_looks(uses)
  for _, use in ipairs(has_shared and uses or {}) do
    local limit = limit_of[use.name]
    if limit and limit.is_shared and redis.call('EXISTS', gate .. 'blocked:' .. use.limit) == 0 then
      redis.call('ZREM', gate .. 'looks', use.limit)
    end
  end
end

-- Hands out from the lane whose turn it is. `is_only`: its key has no other lane with turns; `had`: the turns the key
-- has had; `from_ms`: as in `take_from`.
local function serve(lane, parts, had, is_only, from_ms)
  local head, record, due_ms, is_current = next_of(lane, from_ms)
  has_served = true
  if record and not is_current then
    hand_out(record, '')  -- its consumer gives it another ticket
  elseif record then
    now_had = had
    had = had + 1 / parts.weight
    local slots = take_room(parts.uses, due_ms)
    if slots:find('|running%20task:', 1, true) then  -- a throttler asks which messages these are
      local _, id = ticket_in(record)
      slots = id .. '@' .. string.format('%.0f', now_ms) .. slots
    end
    hand_out(record, slots)
    if head or not is_only then redis.call('ZADD', gate .. 'turns', had, parts.key) end
  end
  if head then
    redis.call('ZADD', gate .. 'turn:' .. parts.key, order_of(parts, tonumber(head)), lane)
  else
    close(lane, is_only, parts.key, had)
    redis.call('HDEL', gate .. 'lanes', lane)
    forget_looks(parts.uses)
  end
  let_next(parts.uses)
end

-- The limit for which a message with this due time must wait, when to look again, and whether there is capacity, but for
-- others that wait and come first; nil if the message can go. `had`, `order`: as in `block`.
local function full_for(due_ms, parts, had, order)
  local full, look_ms, is_left
  for _, use in ipairs(parts.uses) do
    local free, next_ms = has_room(use, due_ms)
    local leaves = free and is_for_others(use, due_ms, parts.key, had, order)
    -- A limit of this queue is preferred: other queues wait for a global one too.
    if (not free or leaves) and (not full or not limit_of[use.name].is_shared) then
      full, look_ms, is_left = use, next_ms or now_ms + LOOK_MS, leaves
    end
  end
  return full, look_ms, is_left
end

-- As `full_for`, for the first message of the lane. If it is late and lacks a token that only late messages need, then
-- for the first message that is not late. If that one can go, the last value is its due time.
local function full_limit(lane, parts, had, order)
  local line, from_ms = gate .. 'lane:' .. lane, nil
  local due_ms = tonumber(minds_lateness and redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2] or 0)
  while true do
    local full, look_ms, is_left = full_for(due_ms, parts, had, order)
    local after_ms = full and limit_of[full.name].after_ms or 0
    if after_ms == 0 or now_ms - due_ms <= after_ms then return full, look_ms, is_left, from_ms end
    from_ms = redis.call('ZRANGEBYSCORE', line, now_ms - after_ms, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    if not from_ms then return full, look_ms, is_left end
    due_ms = tonumber(from_ms)
  end
end

-- The lane whose turn is next, the turns that its key has had, the order of the lane, and whether the key has no other
-- lane; nil if no lane has turns.
local function first_lane()
  while true do
    local key, had = unpack(redis.call('ZRANGE', gate .. 'turns', 0, 0, 'WITHSCORES'))
    if not key then return nil end
    local lane, order, other = unpack(redis.call('ZRANGE', gate .. 'turn:' .. key, 0, 1, 'WITHSCORES'))
    if lane then return lane, tonumber(had), order, not other end
    redis.call('ZREM', gate .. 'turns', key)
    in_turn[key] = nil
  end
end

-- The only lane with turns, if its first message lacks slots of a global limit.
local lacks_slots

-- Hands out in turn; returns whether it has stopped while some lane could continue.
local function serve_all()
  local tries = want + 200  -- lanes found without capacity wait for it from then on
  while has_space(want) and tries > 0 do
    tries = tries - 1
    local lane, had, order, is_only = first_lane()
    if not lane then return false end
    local parts = parts_of_lane(lane)
    local full, look_ms, is_left, from_ms = full_limit(lane, parts, had, order)
    if full then
      block(lane, parts, full.limit, look_ms, had, order, is_only, is_left)
    else
      serve(lane, parts, had, is_only, from_ms)
    end
  end
  if not has_shared then return redis.call('EXISTS', gate .. 'turns') == 1 end

  -- Whether some lane could continue without more slots of global limits. A lane that could not waits from now on. The only
  -- lane with turns does not: moving it back and forth would cost more than everything else.
  local function some_can_go_on(tries)
    while tries > 0 do
      local lane, had, order, is_only = first_lane()
      if not lane then return false end
      local parts = parts_of_lane(lane)
      local full, look_ms, is_left = full_limit(lane, parts, had, order)
      if not full then return true end
      if is_only and limit_of[full.name].is_shared and redis.call('ZCARD', gate .. 'turns') == 1 then
        lacks_slots, some_wait = lane, true
        redis.call('ZADD', gate .. 'looks', 'LT', look_ms, full.limit)
        return false
      end
      block(lane, parts, full.limit, look_ms, had, order, is_only, is_left)
      tries = tries - 1
    end
    return redis.call('EXISTS', gate .. 'turns') == 1
  end

  return some_can_go_on(tries)
end

local next_ms = earliest()
local pause = redis.call('GET', of_queue('paused'))
local is_paused, until_ms = false, 0
if pause then
  -- include: pause
  is_paused, until_ms = is_paused_by(pause)
  if not is_paused then forget_in_a_day(of_queue('paused')) end
end

local more = false
if is_paused then
  next_ms, some_wait = until_ms > 0 and until_ms or nil, false
elseif version == '' then
  -- Without policies: hands out in the order of due times, regardless of lanes. The caller clears the lanes and comes again.
  for _, member in ipairs(want > 0 and redis.call('ZRANGE', waiting, 0, want - 1) or {}) do
    if not has_space(want) then break end
    local kept = bucket_look(messages, member)
    redis.call('ZREM', waiting, member)
    forget_record(member)
    if kept then hand_out((promoted(member, kept)), '') end
  end
  more = true
else
  local more_due, more_ready, bring = false, false, nil
  local is_due = next_ms and next_ms <= now_ms
  if is_due or redis.call('EXISTS', unpack(ready)) > 0 then
    -- include: check_lists bucket_add backlog forget_duplicate arrive bring
    check_lists()
    if is_due then
      more_due = bring_due()
      next_ms = earliest()
    end
    if redis.call('EXISTS', unpack(ready)) > 0 then
      local has_turns = redis.call('EXISTS', gate .. 'turns') == 1
      -- Many messages without a ticket, as after a change of policies, must not delay those that have turns.
      more_ready = bring_ready(has_turns and math.floor((want + tag % 2) / 2) or want)
      bring = bring_ready
    end
  end
  look(lease_ms > 0 and not lease_end_ms)  -- a new consumer may have other limits
  for limit, count in pairs(allowed) do
    if count > 0 then unblock(limit) end
  end
  more = serve_all()
  if more_ready and #taken == 0 and want > 0 then
    more_ready = bring(want)
    more = serve_all()
  end
  more = more or more_ready or more_due
end
if #gone > 0 then bucket_drop_all(messages, gone) end
if now_had then
  redis.call('ZREMRANGEBYSCORE', gate .. 'passed', '-inf', now_had)
  redis.call('SET', gate .. 'now', string.format('%.17g', now_had))
end
if (has_served or #taken > 0) and redis.call('EXISTS', waiting) == 0 then redis.call('DEL', gate .. 'now', gate .. 'last', gate .. 'passed') end

if lease_ms > 0 then
  if lasts_long and #taken > 0 then redis.call('ZADD', consumers, now_ms + lease_ms, consumer) end
  in_parts('HSET', unacked, taken)
  in_parts('HSET', gate .. 'slots:' .. consumer, held)
  keep_taken()
end
tell_of_arrivals()
local lacks = {}
if some_wait and has_shared then
  -- The messages that wait for global limits, beginning with the limits not reported for the longest time. Reports the
  -- first lane of each limit.
  local function lacking()
    local lacks, place = {}, {}
    local function tell_of(lane, others)
      local count = others + redis.call('ZCARD', gate .. 'lane:' .. lane)
      for _, use in ipairs(parts_of_lane(lane).uses) do
        local limit = limit_of[use.name]
        if limit and limit.is_shared and not use.passes and count > 0 then
          local at = place[use.limit]
          if at then
            lacks[at] = lacks[at] + count
          else
            lacks[#lacks + 1], lacks[#lacks + 2], lacks[#lacks + 3] = use.limit, use.cost, count
            place[use.limit] = #lacks
          end
        end
      end
    end
    if lacks_slots then tell_of(lacks_slots, 0) end
    for _, limit in ipairs(redis.call('ZRANGE', gate .. 'looks', 0, 199)) do
      local numbers = limit_of[limit:match('^[^:]*')]
      local key = numbers and numbers.is_shared and redis.call('ZRANGE', gate .. 'blocked:' .. limit, 0, 0)[1]
      local lane = key and redis.call('ZRANGE', blocked_line(limit, key), 0, 0)[1]
      if lane and parts_of_lane(lane) then tell_of(lane, redis.call('ZCARD', gate .. 'blocked:' .. limit) - 1) end
      if key then redis.call('ZADD', gate .. 'looks', now_ms + SHARED_LOOK_MS, limit) end
      if #lacks >= 3 * math.max(want, 10) then break end
    end
    return lacks
  end

  lacks = lacking()
end
local look_ms = some_wait ~= false and next_look()
if look_ms and waits == '0' and redis.call('EXISTS', armed) == 0 then announce_due(look_ms) end
if look_ms and (not next_ms or look_ms < next_ms) then next_ms = look_ms end
-- A consumer that got all it wanted may have no room for messages without slots, but another consumer may.
pass_on(answer, more or (#lacks > 0 and #taken > 0 and #taken / 2 == want), #taken > 0, next_ms)
if not more then answer[3] = 0 end
if expires_ms > 0 then
  -- include: expiry
  local kept_ms = expire_as_declared(expires_ms, lease_ms)
  if lease_ms > 0 then
    leases_last_for(consumers, kept_ms)
    last_for(unacked, kept_ms)
    last_for(gate .. 'slots', kept_ms)
    last_for(gate .. 'slots:' .. consumer, kept_ms)
  end
elseif lease_ms > 0 and (expires_ms < 0 or redis.call('PTTL', consumers) >= 0 and redis.call('EXISTS', of_queue('expires')) == 0) then
  -- include: auto_delete
  last_while_used(consumers, expires_ms == 0 or redis.call('EXISTS', unacked, gate .. 'slots:' .. consumer) > 0, lease_ms)
end
if version == '' and redis.call('EXISTS', waiting) == 1 then answer[3] = answer[3] + 2 end
if #lacks > 0 then
  answer[3] = answer[3] + 16
  table.insert(answer, 5, lacks)
end
if pause then
  answer[3] = answer[3] + 8
  table.insert(answer, 5, is_paused and 0 or until_ms)
end
return answer
