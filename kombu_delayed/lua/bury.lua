-- bury: move messages that a consumer holds to the dead letters, with the reason.
-- Twice is safe for what is held: what is not held any more stays where it is.
local unacked       = KEYS[1]            -- HASH tag -> priority step + message, of this consumer
local dead          = KEYS[2]            -- ZSET id -> time of burial
local dead_messages = KEYS[3]            -- HASH id -> priority step + message
local dead_reasons  = KEYS[4]            -- HASH id -> JSON: why, by whom
local now           = ARGV[1]
local entries       = {unpack(ARGV, 2)}  -- tag, id, reason, record (empty: the one that is held); …
-- include: clock
-- returns how many; O(log n) a message
local buried = 0
for i = 1, #entries, 4 do
  local tag, id, reason, record = entries[i], entries[i + 1], entries[i + 2], entries[i + 3]
  if record == '' then record = redis.call('HGET', unacked, tag) end
  if record then
    local member, n = id, 1
    while redis.call('HSETNX', dead_messages, member, record) == 0 do
      n = n + 1
      member = id .. '\31' .. n
    end
    redis.call('HSET', dead_reasons, member, reason)
    redis.call('ZADD', dead, now_ms, member)
    redis.call('HDEL', unacked, tag)
    buried = buried + 1
  end
end
return buried
