-- set_limit: override the declared numbers of a limit. Call retry_limit afterwards.
-- Idempotent: a second call replaces the first.
-- keys: gate absent
-- arguments: now name numbers length_ms:number note
--   name: the limit, as in the names of slots
--   numbers: slots, ms per token, burst; - for the declared number
--   length_ms: 0: it has no end
--   note: JSON: who set it, when and why
-- include: clock override
-- returns 1; O(overrides of the queue)
local found = redis.call('HGETALL', gate .. 'overrides')
for i = 1, #found, 2 do
  if not holds_still(found[i + 1]) then redis.call('HDEL', gate .. 'overrides', found[i]) end
end
local until_ms = length_ms > 0 and now_ms + length_ms or 0
redis.call('HDEL', gate .. 'overrides', name)  -- a full server accepts writes only after a script has freed memory
redis.call('HSET', gate .. 'overrides', name, string.format('%s %.0f %s', numbers, until_ms, note))
return 1
