-- page: read delayed messages in the order of their due times.
local partitions  = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed     = KEYS[2]            -- what the partitions' keys begin with
local messages    = KEYS[3]            -- HASH id -> priority step + due_ms + message
local from_ms     = ARGV[1]            -- due from then on …
local after       = ARGV[2]            -- … and, of those due at that very time, behind = and a member (or empty)
local until_ms    = tonumber(ARGV[3])  -- due before then
local limit       = tonumber(ARGV[4])  -- look at so many
local limit_bytes = tonumber(ARGV[5])  -- and at no more when so much is to be returned
local needle      = ARGV[6]            -- return only messages with this text in them (or empty)
-- returns {0 at the end or 1, due_ms and = and member of the last one looked at, id, priority step + due_ms + message, …};
--   O(limit)

-- Members due at one instant are in the order of their bytes; Lua's own would be the locale's.
local function is_behind(member)
  local last = after:sub(2)
  for i = 1, math.min(#member, #last) do
    if member:byte(i) ~= last:byte(i) then return member:byte(i) > last:byte(i) end
  end
  return #member > #last
end

-- The last one looked at may have gone since, or have another due time: its place is searched for.
local function start_in(key)
  local low = redis.call('ZCOUNT', key, '-inf', '(' .. from_ms)
  if after == '' then return low end
  local high = redis.call('ZCOUNT', key, '-inf', from_ms)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_behind(redis.call('ZRANGE', key, middle, middle)[1]) then high = middle else low = middle + 1 end
  end
  return low
end

local answer = {0, from_ms, after}
local name = redis.call('ZREVRANGEBYSCORE', partitions, from_ms, '-inf', 'LIMIT', 0, 1)[1]
local rank = name and redis.call('ZRANK', partitions, name) or 0
local start = name and start_in(delayed .. name) or 0
local left, bytes = limit, 0
while left > 0 and bytes < limit_bytes do
  name = redis.call('ZRANGE', partitions, rank, rank)[1]
  if not name then return answer end
  local wanted = math.min(left, 128)
  local found = redis.call('ZRANGE', delayed .. name, start, start + wanted - 1, 'WITHSCORES')
  local members, is_end = {}, false
  for i = 1, #found, 2 do
    is_end = tonumber(found[i + 1]) >= until_ms
    if is_end then break end
    members[#members + 1] = found[i]
    answer[2], answer[3] = found[i + 1], '=' .. found[i]
  end
  if #members > 0 then
    for i, kept in ipairs(redis.call('HMGET', messages, unpack(members))) do
      if kept and (needle == '' or kept:find(needle, 1, true)) then
        answer[#answer + 1], answer[#answer + 2] = members[i], kept
        bytes = bytes + #kept
      end
    end
  end
  if is_end then return answer end
  left = left - #members
  if #found / 2 < wanted then
    rank, start = rank + 1, 0
  else
    start = start + wanted
  end
end
answer[1] = 1
return answer
