-- purge: drop what is ready and what is delayed, a bounded part of the backlog a call.
-- Twice is safe; call it until it returns 0.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed    = KEYS[2]            -- what the partitions' keys begin with
local messages   = KEYS[3]            -- HASH id -> priority step + message
local duplicates = KEYS[4]            -- HASH id -> how many messages share it
local wake       = KEYS[5]            -- ZSET token -> when to claim
local ready      = {unpack(KEYS, 6)}  -- LIST per priority step
local limit      = tonumber(ARGV[1])  -- partitions a call
-- returns how many messages are gone; O(messages that go)
local count = 0
for _, list in ipairs(ready) do
  count = count + redis.call('LLEN', list)
  redis.call('UNLINK', list)
end
for _, name in ipairs(redis.call('ZRANGE', partitions, 0, limit - 1)) do
  local key = delayed .. name
  while true do
    local members = redis.call('ZRANGE', key, 0, 999)
    if #members == 0 then break end
    count = count + redis.call('HDEL', messages, unpack(members))
    redis.call('ZREMRANGEBYRANK', key, 0, #members - 1)
  end
  redis.call('ZREM', partitions, name)
end
if redis.call('EXISTS', partitions) == 0 then redis.call('UNLINK', wake, duplicates) end
return count
