-- clear: remove the lanes of a gate at which no message waits. Messages that arrive in the meantime are not affected.
-- Idempotent; call it until it returns 0.
-- keys: waiting gate
-- arguments: limit:number
--   limit: about how many lanes a call removes
-- returns how many lanes were removed; tasks keep their slots
if redis.call('EXISTS', waiting) == 1 then return 0 end
local cursor, lanes = '0', {}
repeat
  cursor, lanes = unpack(redis.call('HSCAN', gate .. 'lanes', cursor, 'COUNT', limit))
until #lanes > 0 or cursor == '0'
for i = 1, #lanes, 2 do
  local lane, limit = lanes[i], lanes[i + 1]
  local key = lane:match('|([^|*]*)')
  local keys = gate .. (limit == '' and 'turns' or 'blocked:' .. limit)
  local line = limit == '' and gate .. 'turn:' .. key or keys .. '|' .. key
  redis.call('UNLINK', gate .. 'lane:' .. lane)
  redis.call('HDEL', gate .. 'lanes', lane)
  redis.call('ZREM', line, lane)
  if redis.call('EXISTS', line) == 0 then redis.call('ZREM', keys, key) end
  if redis.call('EXISTS', keys) == 0 then redis.call('ZREM', gate .. 'looks', limit) end
end
if #lanes == 0 then redis.call('DEL', gate .. 'turns', gate .. 'passed', gate .. 'now', gate .. 'last', gate .. 'looks') end
return #lanes / 2
