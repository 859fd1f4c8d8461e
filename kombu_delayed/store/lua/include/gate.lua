-- gate: messages that wait for their turn. Messages with the same lane in their tickets wait in one line. The lanes of
-- a fairness key share its turns, and the key with the fewest turns for its weight goes first.
-- needs: gate delayed
-- The name of a lane is what its messages have in common: rank|key*weight|limit:key*cost|…; `!` before a limit means
-- that they pass it.
local waiting = delayed .. 'waiting'
local LOOK_MS = 60000
local known = {}

local function parts_of_lane(lane)
  local parts = known[lane]
  if parts == nil then
    local rank, key, weight, rest = lane:match('^(-?%d+)|([^|*]*)%*(%d+%.?%d*)(.*)$')
    parts = rank and {rank = tonumber(rank), key = key, weight = tonumber(weight), uses = {}} or false
    for passes, limit, name, cost in (rest or ''):gmatch('|(!?)(([^|*:]*)[^|*]*)%*(%d+)') do
      parts.uses[#parts.uses + 1] = {limit = limit, name = name, cost = tonumber(cost), passes = passes == '!'}
    end
    known[lane] = parts
  end
  return parts
end

-- The parts of the ticket in a record: version, id, place among messages due in the same millisecond (or empty), lane.
-- `from`: where its members begin, behind the due time; nil: unknown.
local function ticket_in(record, from)
  local front = from and '^"ticket":"' or '^[^{]?%d*{"ticket":"'
  local version, id, place, lane = record:match(front .. '([^"|]*)|([^"|]*)|([^"|]*)|([^"]*)"', from)
  if version then return version, id, place, lane end
  local at = record:find('{', 1, true)
  if not at then return nil end
  at = record:match('^"due_ms": ?%d+, ?()', at + 1) or at + 1
  at = record:match('^"wait": ?{[^}]*}, ?()', at) or at
  return record:match('^"ticket": ?"([^"|]*)|([^"|]*)|([^"|]*)|([^"]*)"', at)
end

-- Puts a ticket into a record, after the wait.
local function with_ticket(record, ticket)
  local at = record:find('{', 1, true)
  at = record:match('^"due_ms": ?%d+, ?()', at + 1) or at + 1
  at = record:match('^"wait": ?{[^}]*}, ?()', at) or at
  local behind = record:match('^"ticket": ?"[^"]*", ?()', at) or at
  return record:sub(1, at - 1) .. '"ticket":"' .. ticket .. '",' .. record:sub(behind)
end

-- The order of the lanes of a key: by rank, then the one that has waited longest.
local function order_of(parts, at)
  return parts.rank * 2 ^ 42 + at
end

-- `now_had`: how many turns the key of the last turn had before it. A returning key begins there.
-- `last_came`: where the last new key began. A new key begins behind it.
local now_had, last_came

local function read_now()
  if last_came then return end
  local had, came = unpack(redis.call('MGET', gate .. 'now', gate .. 'last'))
  now_had = now_had or tonumber(had or 0)
  last_came = tonumber(came or 0)
end

-- The keys that this call has found among those with turns, or added to them.
local in_turn = {}

local function had_by(key)
  return tonumber(redis.call('ZSCORE', gate .. 'turns', key) or redis.call('ZSCORE', gate .. 'passed', key) or 0)
end

-- Calls a command with a key and any number of arguments, split into calls with an even number; returns the answers of
-- all calls in one list.
local function in_parts(command, key, arguments)
  local answers = {}
  for i = 1, #arguments, 2000 do
    local answer = redis.call(command, key, unpack(arguments, i, math.min(i + 1999, #arguments)))
    if type(answer) == 'table' then
      for _, each in ipairs(answer) do answers[#answers + 1] = each end
    end
  end
  return answers
end

-- Gives turns to keys that have none. `stood`: the turns they had had when they began to wait for a limit.
local function begin_turns(keys, stood)
  local new, turns, gone = {}, {}, {}
  for i, had in ipairs(in_parts('ZMSCORE', gate .. 'turns', keys)) do
    if not had then new[#new + 1] = keys[i] end
  end
  if #new == 0 then return end
  read_now()
  local came, behind = last_came, 2 ^ -20  -- so small that a million keys can arrive before others get two turns
  for i, had in ipairs(in_parts('ZMSCORE', gate .. 'passed', new)) do
    if had then gone[#gone + 1] = new[i] end
    had = math.max(tonumber(had or 0), stood or 0)
    if not stood and had <= now_had then
      last_came = math.max(last_came, now_had) + behind
      had = last_came
    end
    turns[#turns + 1], turns[#turns + 2] = math.max(now_had, had), new[i]
  end
  if last_came > came then redis.call('SET', gate .. 'last', string.format('%.17g', last_came)) end
  in_parts('ZADD', gate .. 'turns', turns)
  in_parts('ZREM', gate .. 'passed', gone)
end

-- Gives turns to lanes. `heads` has the places of their first messages. `stood`: as in `begin_turns`.
local function open_all(lanes, heads, stood)
  local entries, keys = {}, {}
  for _, lane in ipairs(lanes) do
    local parts = parts_of_lane(lane)
    entries[#entries + 1], entries[#entries + 2] = lane, ''
    redis.call('ZADD', gate .. 'turn:' .. parts.key, order_of(parts, heads[lane]), lane)
    if not in_turn[parts.key] then keys[#keys + 1] = parts.key end
    in_turn[parts.key] = true
  end
  in_parts('HSET', gate .. 'lanes', entries)
  begin_turns(keys, stood)
end

-- Gives turns to a lane; returns whether it has a message. `stood`: as in `begin_turns`.
local function open(lane, stood)
  local head = redis.call('ZRANGE', gate .. 'lane:' .. lane, 0, 0, 'WITHSCORES')[2]
  if head then
    open_all({lane}, {[lane] = tonumber(head)}, stood)
  else
    redis.call('HDEL', gate .. 'lanes', lane)
  end
  return head ~= nil
end

-- Takes the turns from a lane. `is_only`: its key has no other lane with turns; `had`: the turns the key has had.
local function close(lane, is_only, key, had)
  redis.call('ZREM', gate .. 'turn:' .. key, lane)
  if is_only then
    redis.call('ZREM', gate .. 'turns', key)
    redis.call('ZADD', gate .. 'passed', had, key)
    in_turn[key] = nil
  end
end

-- The lanes of a key that wait for a limit.
local function blocked_line(limit, key)
  return gate .. 'blocked:' .. limit .. '|' .. key
end

-- Removes a lane from the lanes of its key that wait for a limit; `has_others`: other keys wait for it too.
local function leave_line(limit, key, lane, has_others)
  local line = blocked_line(limit, key)
  redis.call('ZREM', line, lane)
  if redis.call('EXISTS', line) == 1 then return end
  redis.call('ZREM', gate .. 'blocked:' .. limit, key)
  if not has_others then redis.call('ZREM', gate .. 'looks', limit) end
end

-- Ends the wait of the first lane in line for a limit; returns whether there was one.
local function unblock(limit)
  local blocked = gate .. 'blocked:' .. limit
  local tries = 0
  while true do
    local key, stood, other, other_had = unpack(redis.call('ZRANGE', blocked, 0, 1, 'WITHSCORES'))
    if not key then return false end
    tries = tries + 1
    local had = other and tries < 10 and had_by(key)
    if had and had > tonumber(other_had) then  -- it has had turns in other lanes since
      redis.call('ZADD', blocked, had, key)
    else
      local lane = redis.call('ZRANGE', blocked_line(limit, key), 0, 0)[1]
      leave_line(limit, key, lane or '', other)
      if lane and open(lane, tonumber(stood)) then return true end
    end
  end
end
