-- forget: drop dead letters for good.
-- Twice is safe.
local dead          = KEYS[1]            -- ZSET id -> time of burial
local dead_messages = KEYS[2]            -- HASH id -> priority step + message
local dead_reasons  = KEYS[3]            -- HASH id -> JSON: why, by whom
local ids           = {unpack(ARGV, 1)}
-- returns how many there were; O(log n) a letter
redis.call('ZREM', dead, unpack(ids))
redis.call('HDEL', dead_reasons, unpack(ids))
return redis.call('HDEL', dead_messages, unpack(ids))
