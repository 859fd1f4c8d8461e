-- page: read delayed messages, including those at a gate, in the order of their due times.
-- keys: partitions delayed messages
-- arguments: from_ms after until_ms:number limit:number limit_bytes:number needle
--   from_ms: due from this time on …
--   after: … and, among those due at exactly that time, after this member, given with = in front (or empty)
--   until_ms: due before this time
--   limit: how many messages to read
--   limit_bytes: stop earlier when the answer has this many bytes
--   needle: return only messages that contain this text (or empty), and compressed ones; a text within the body may be
--     missed
-- include: buckets start has_needle
-- returns {0 at the end or 1, how many messages were read, due_ms of the last of them, its member after =, id, its record,
--   packed or not, …}; O(limit)

-- These two return functions. Each call of such a function returns the next members with due times; empty at the end.
local function in_tree()
  local name = redis.call('ZREVRANGEBYSCORE', partitions, from_ms, '-inf', 'LIMIT', 0, 1)[1]
  local rank = name and redis.call('ZRANK', partitions, name) or 0
  local start = name and start_in(delayed .. name) or 0
  return function()
    while true do
      name = redis.call('ZRANGE', partitions, rank, rank)[1]
      if not name then return {} end
      local found = redis.call('ZRANGE', delayed .. name, start, start + 127, 'WITHSCORES')
      start = start + 128
      if #found < 256 then rank, start = rank + 1, 0 end
      if #found > 0 then return found end
    end
  end
end

local function at_gate()
  local key = delayed .. 'waiting'
  local start = start_in(key)
  return function()
    local found = redis.call('ZRANGE', key, start, start + 127, 'WITHSCORES')
    start = start + 128
    return found
  end
end

-- Merges two such functions into one, in order.
local function merged(first, second)
  local sides = {{next = first, found = {}, at = 1}, {next = second, found = {}, at = 1}}
  local function head(side)
    if side.at > #side.found then side.found, side.at = side.next(), 1 end
    return side.found[side.at], tonumber(side.found[side.at + 1])
  end
  return function()
    local found = {}
    while #found < 256 do
      local one, one_ms = head(sides[1])
      local other, other_ms = head(sides[2])
      local is_other = other and (not one or other_ms < one_ms or (other_ms == one_ms and is_greater(one, other)))
      local side = sides[is_other and 2 or 1]
      if not (one or other) then break end
      found[#found + 1], found[#found + 2] = side.found[side.at], side.found[side.at + 1]
      side.at = side.at + 2
    end
    return found
  end
end

local answer = {0, 0, from_ms, after}
local next_found = in_tree()
if redis.call('EXISTS', delayed .. 'waiting') == 1 then next_found = merged(next_found, at_gate()) end
local left, bytes = limit, 0
while left > 0 and bytes < limit_bytes do
  local found = next_found()
  local members, is_end = {}, #found == 0
  for i = 1, math.min(#found, left * 2), 2 do
    is_end = tonumber(found[i + 1]) >= until_ms
    if is_end then break end
    members[#members + 1] = found[i]
    answer[3], answer[4] = found[i + 1], '=' .. found[i]
  end
  answer[2] = answer[2] + #members
  if #members > 0 then
    for i, kept in ipairs(bucket_read_all(messages, members)) do
      if kept and has_needle(members[i], kept) then
        answer[#answer + 1], answer[#answer + 2] = members[i], kept
        bytes = bytes + #kept
      end
    end
  end
  if is_end then return answer end
  left = left - #members
end
answer[1] = 1
return answer
