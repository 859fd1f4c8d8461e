-- resume: let consumers claim from a paused queue again, and wake them.
-- Idempotent.
-- keys: partitions delayed messages wake armed gate paused ready...
-- arguments: now steps
-- include: clock waiting ready earliest announce of_queue expiry pause
-- returns 1 if it was paused, else 0
local note = redis.call('GET', paused)
if not note or not is_paused_by(note) then return 0 end
redis.call('DEL', armed)  -- also lets a full server accept the rest
redis.call('SET', paused, (note:gsub('^(%d+) %d+', string.format('%%1 -%.0f', now_ms))))
forget_in_a_day(paused)
announce_all()
expire_as_noted()
return 1
