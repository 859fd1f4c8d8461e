-- gather: add messages to the tree. Consecutive messages of one partition are indexed together. After backlog.
-- needs: partitions delayed partition_size
local gathered = {}
local place, from_ms, to_ms
local room = 0

-- Only this puts gathered messages into the tree. Other functions may change the tree afterwards.
local function index_gathered()
  if #gathered > 0 then
    local key = delayed .. place
    redis.call('ZADD', key, unpack(gathered))
    if room <= 0 then split(place, redis.call('ZCARD', key), gathered[#gathered - 1]) end
    gathered = {}
  end
  place = nil
end

-- The bounds of a partition are only worth reading for its second message.
local function find_place(due_ms)
  local found = partition_for(due_ms)
  if found == place then
    from_ms = tonumber(redis.call('ZSCORE', partitions, place))
    local after = redis.call('ZRANGEBYSCORE', partitions, string.format('(%.0f', due_ms), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    to_ms = tonumber(after[2] or math.huge)
  else
    index_gathered()
    place, from_ms, to_ms = found, due_ms, due_ms
    room = partition_size - redis.call('ZCARD', delayed .. place)
  end
end

local function gather(member, due_ms)
  if not place or due_ms < from_ms or due_ms >= to_ms then find_place(due_ms) end
  gathered[#gathered + 1], gathered[#gathered + 2] = due_ms, member
  room = room - 1
  if room <= 0 then index_gathered() end
end
