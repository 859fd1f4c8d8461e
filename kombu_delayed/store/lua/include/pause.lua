-- pause: whether a queue is paused, by its note, after clock. A note is `from until JSON`: without an end until
-- is 0. When that has passed, it is since when the queue goes on; where somebody has resumed it, it is negative, as the
-- clock may be set back. Only then the note expires, after a day: a server may evict what has an expiry.
-- needs: nothing
local function is_paused_by(note)
  local until_ms = tonumber(note:match('^%d+ (-?%d+) '))
  if until_ms < 0 then return false, -until_ms end
  return until_ms == 0 or until_ms > now_ms, until_ms
end

local function forget_in_a_day(paused)
  if redis.call('PTTL', paused) < 0 then redis.call('PEXPIRE', paused, 86400000) end
end
