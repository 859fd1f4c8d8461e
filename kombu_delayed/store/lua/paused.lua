-- paused: read the pause of a queue: by whom, since when and until when. Read-only.
-- keys: paused
-- arguments: now
-- include: clock pause
-- returns {its note, 1 if it is paused now, else 0}, or {} if there is no note
local note = redis.call('GET', paused)
if not note then return {} end
return {note, is_paused_by(note) and 1 or 0}
