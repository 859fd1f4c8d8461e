-- set_limit: let other numbers hold for a limit than those that are declared. Call retry_limit then.
-- Twice is safe: the second one replaces the first.
-- keys: gate absent
-- arguments: now name numbers length_ms:number note
--   name: the limit, as slots name it
--   numbers: slots, ms a token, burst; - for one as it is declared
--   length_ms: 0: it has no end
--   note: JSON, of who has set it, when and why
-- include: clock override
-- returns 1; O(limits of the queue that were set)
local found = redis.call('HGETALL', gate .. 'overrides')
for i = 1, #found, 2 do
  if not holds_still(found[i + 1]) then redis.call('HDEL', gate .. 'overrides', found[i]) end
end
local until_ms = length_ms > 0 and now_ms + length_ms or 0
redis.call('HSET', gate .. 'overrides', name, string.format('%s %.0f %s', numbers, until_ms, note))
return 1
