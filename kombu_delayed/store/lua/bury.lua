-- bury: move messages that a consumer holds to the dead letters, with the reason.
-- Twice is safe for what is held: what is not held any more stays where it is.
local unacked       = KEYS[1]            -- HASH tag -> priority step + message, of this consumer
local dead          = KEYS[2]            -- ZSET id -> time of burial
local dead_messages = KEYS[3]            -- HASH id -> priority step + message
local dead_reasons  = KEYS[4]            -- HASH id -> JSON: why, by whom
local events        = KEYS[5]            -- STREAM of lifecycle events
local now           = ARGV[1]
local consumer      = ARGV[2]
local dead_limit    = tonumber(ARGV[3])
local dead_age_ms   = tonumber(ARGV[4])
local event_limit   = tonumber(ARGV[5])  -- about so many are kept; 0: none
local failures      = ARGV[6]            -- JSON: the attempts that have failed (or empty)
local entries       = {unpack(ARGV, 7)}  -- tag, id, reason, record (empty: the one that is held); …
-- include: clock dead events
-- returns the dead letters that they became; O(log n) a message
redis.call('HDEL', unacked, '')          -- a full server lets a script write that has freed memory first
local buried = {}
for i = 1, #entries, 4 do
  local tag, id, reason, record = entries[i], entries[i + 1], entries[i + 2], entries[i + 3]
  if record == '' then record = redis.call('HGET', unacked, tag) end
  if record then
    local deliveries = deliveries_of(record) + 1
    buried[#buried + 1] = entomb(id, record, consumer, deliveries, reason, failures ~= '' and failures or nil)
    tell_of_held('buried', record, consumer, deliveries, id, reason)
    redis.call('HDEL', unacked, tag)
  end
end
return buried
