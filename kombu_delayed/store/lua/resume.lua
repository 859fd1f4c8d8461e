-- resume: let consumers claim from a paused queue again, and tell them.
-- Twice is safe.
-- keys: partitions delayed messages duplicates wake armed gate paused ready...
-- arguments: now kept_ms:number steps
--   kept_ms: for so long it is known since when the queue goes on
-- include: clock waiting ready backlog announce expiry pause
-- returns 1 if it was paused, else 0
local note = redis.call('GET', paused)
if not note or not is_paused_by(note) then return 0 end
redis.call('SET', paused, note:gsub('^(%d+) %d+', string.format('%%1 %.0f', now_ms)), 'PX', kept_ms)
redis.call('DEL', armed)
announce_all()
expire_as_noted()
return 1
