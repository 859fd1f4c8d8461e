-- forget_dictionaries: let the dictionaries of a queue without messages in any state expire.
-- Idempotent. A compressed message that arrives before they expire keeps them: see `dictionary`.
-- keys: messages dead_messages consumers dictionaries absent ready...
-- arguments: stay_ms:number
--   stay_ms: how long they stay, for readers of messages that have just left the queue; 0: drop them now; -1: change nothing
-- returns 1 if no message needs them any more; O(consumers)
local is_empty = redis.call('EXISTS', messages, dead_messages, messages .. ':buckets', dead_messages .. ':buckets', unpack(ready)) == 0
for _, consumer in ipairs(is_empty and redis.call('ZRANGE', consumers, 0, -1) or {}) do
  is_empty = is_empty and redis.call('EXISTS', dictionaries:match('^.*}:') .. 'unacked:' .. consumer) == 0
end
if not is_empty then
  if stay_ms >= 0 then redis.call('PERSIST', dictionaries) end
  return 0
end
if stay_ms == 0 then
  redis.call('UNLINK', dictionaries)
elseif stay_ms > 0 and redis.call('PTTL', dictionaries) == -1 then
  redis.call('PEXPIRE', dictionaries, stay_ms)
end
return 1
