-- pause: let no consumer claim from a queue, until it is resumed or for a time.
-- Idempotent: the second note replaces the first, and the queue is paused since the first.
-- keys: paused
-- arguments: now length_ms:number note
--   length_ms: 0: it has no end
--   note: JSON: who paused it and why
-- include: clock pause
-- returns 1
local before = redis.call('GET', paused)
local from = before and is_paused_by(before) and before:match('^%d+') or string.format('%.0f', now_ms)
local until_ms = length_ms > 0 and now_ms + length_ms or 0
redis.call('DEL', paused)  -- a full server accepts writes only after a script has freed memory
redis.call('SET', paused, string.format('%s %.0f %s', from, until_ms, note))
return 1
