-- publish: put messages at the tails of their ready lists.
-- Twice is not safe: a list does not know its members.
-- keys: wake absent ready...
-- arguments: expires_ms:number steps records...
--   expires_ms: 0: none is known; below 0: unless the queue has another one
--   records: priority step + message; …
-- include: waiting ready expiry
-- returns how many; O(1) a message
local is_new = false
for i = 1, #records do
  local length = redis.call('LPUSH', list_for(records[i]:sub(1, 1)), records[i]:sub(2))
  is_new = is_new or length == 1
end
announce_ready()
if expires_ms > 0 then
  expire_as_declared(expires_ms, 0)
elseif expires_ms < 0 and redis.call('EXISTS', of_queue('expires')) == 0 then
  expire_in(-expires_ms)  -- with no note: who waits for it may declare another one yet
elseif is_new then
  expire_as_noted()
end
return #records
