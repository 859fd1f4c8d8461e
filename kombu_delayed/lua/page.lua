-- page: read delayed messages in the order of their due times.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed    = KEYS[2]            -- what the partitions' keys begin with
local messages   = KEYS[3]            -- HASH id -> priority step + due_ms + message
local from_ms    = ARGV[1]            -- due from then on …
local after      = ARGV[2]            -- … and, of those due at that very time, behind this member (or empty)
local until_ms   = tonumber(ARGV[3])  -- due before then
local limit      = tonumber(ARGV[4])  -- look at so many
local needle     = ARGV[5]            -- return only messages with this text in them (or empty)
-- returns {0 at the end or 1, due_ms and id of the last one looked at, id, priority step + due_ms + message, …};
--   O(limit)
local function start_in(key)
  local below = redis.call('ZCOUNT', key, '-inf', '(' .. from_ms)
  if after == '' then return below end
  local rank = redis.call('ZRANK', key, after)
  if rank and rank >= below then return rank + 1 end
  -- It has gone since: its place is found by putting it there for a moment.
  local score = redis.call('ZSCORE', key, after)
  if score then return below end
  redis.call('ZADD', key, from_ms, after)
  rank = redis.call('ZRANK', key, after)
  redis.call('ZREM', key, after)
  return rank
end

local answer = {0, from_ms, after}
local name = redis.call('ZREVRANGEBYSCORE', partitions, from_ms, '-inf', 'LIMIT', 0, 1)[1]
local rank = name and redis.call('ZRANK', partitions, name) or 0
local start = name and start_in(delayed .. name) or 0
local left = limit
while left > 0 do
  name = redis.call('ZRANGE', partitions, rank, rank)[1]
  if not name then return answer end
  local wanted = math.min(left, 1000)
  local found = redis.call('ZRANGE', delayed .. name, start, start + wanted - 1, 'WITHSCORES')
  local members = {}
  for i = 1, #found, 2 do
    if tonumber(found[i + 1]) >= until_ms then left = 0 break end
    members[#members + 1] = found[i]
    answer[2], answer[3] = found[i + 1], found[i]
  end
  if #members > 0 then
    for i, kept in ipairs(redis.call('HMGET', messages, unpack(members))) do
      if kept and (needle == '' or kept:find(needle, 1, true)) then
        answer[#answer + 1], answer[#answer + 2] = members[i], kept
      end
    end
  end
  if left == 0 then return answer end
  left = left - #members
  if #found / 2 < wanted then
    rank, start = rank + 1, 0
  else
    start = start + wanted
  end
end
answer[1] = 1
return answer
