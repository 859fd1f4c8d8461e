-- pop_urgent: take due messages that are more urgent than others out of the tree before their turn. After backlog, in a
-- branch where `partitions .. ':urgent'` exists.
-- needs: partitions delayed
local STEP = 2 ^ 48  -- as in urgent

local function leave_tree(member, due_ms)
  local name = redis.call('ZREVRANGEBYSCORE', partitions, due_ms, '-inf', 'LIMIT', 0, 1)[1]
  local key = name and delayed .. name
  if not name or tonumber(redis.call('ZSCORE', key, member) or -1) ~= due_ms then return false end
  redis.call('ZREM', key, member)
  if redis.call('EXISTS', key) == 0 then redis.call('ZREM', partitions, name) end
  return true
end

-- Passes at most `limit` messages to `take`, as `pop_due` does, having found `members`; returns if more are due.
local function pop_urgent(members, now_ms, limit, take)
  local urgent, at, due, had = partitions .. ':urgent', 0, {}, {bytes = 0, count = 0}
  if #members > 0 then redis.call('ZREM', urgent, unpack(members)) end
  if redis.call('EXISTS', partitions) == 0 then redis.call('UNLINK', urgent) end

  local function take_out(some)
    local left = {}
    redis.call('ZREM', urgent, unpack(some))
    for _, member in ipairs(some) do
      if leave_tree(member, due[member]) then left[#left + 1] = member end
    end
    return #left > 0 and take(left) or 0
  end

  local has_room = true
  while limit > 0 and has_room do
    local first = redis.call('ZRANGEBYSCORE', urgent, at, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if not first[1] or first[1] == '\31' then break end
    at = math.floor(first[2] / STEP) * STEP
    local found, some = redis.call('ZRANGEBYSCORE', urgent, at, at + now_ms, 'WITHSCORES', 'LIMIT', 0, limit), {}
    for i = 1, #found, 2 do
      some[#some + 1], due[found[i]] = found[i], found[i + 1] - at
    end
    local count = give(some, take_out, had)
    limit, has_room = limit - count, count == #some
    at = at + STEP
  end
  local next_ms = earliest()
  return next_ms ~= nil and next_ms <= now_ms
end
