-- publish: put messages at the tails of their ready lists.
-- Not idempotent: a list cannot detect duplicates.
-- keys: wake absent ready...
-- arguments: expires_ms:number steps records...
--   expires_ms: of the queue; 0: not known; negative: used if the queue has no other expiry
--   records: priority step + message; …
-- include: waiting ready of_queue expiry
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
  expire_in(-expires_ms)  -- without a note: its consumer may still declare another expiry
elseif is_new then
  expire_as_noted()
end
return #records
