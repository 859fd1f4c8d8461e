-- publish: put messages at the tails of their ready lists.
-- Twice is not safe: a list does not know its members.
local wake       = KEYS[1]            -- ZSET token -> when to claim
local ready      = {unpack(KEYS, 2)}  -- LIST per priority step
local expires_ms = tonumber(ARGV[1])  -- of the ready lists; 0: never
local steps      = ARGV[2]
local records    = {unpack(ARGV, 3)}  -- priority step + message; …
-- include: waiting ready
-- returns how many; O(1) a message
for i = 1, #records do
  local list = list_for(records[i]:sub(1, 1))
  redis.call('LPUSH', list, records[i]:sub(2))
  if expires_ms > 0 then redis.call('PEXPIRE', list, expires_ms) end
end
announce_ready()
return #records
