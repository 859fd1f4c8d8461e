-- pause: whether a queue is paused, by its note. After clock. A note is `from until JSON`, where until is 0 without an
-- end. An until in the past is the time when the pause ended. It is negative if the queue was resumed, because the
-- clock may be set back. Only after the end does the note expire, in a day: a server may evict keys with an expiry.
-- needs: nothing
local function is_paused_by(note)
  local until_ms = tonumber(note:match('^%d+ (-?%d+) '))
  if until_ms < 0 then return false, -until_ms end
  return until_ms == 0 or until_ms > now_ms, until_ms
end

local function forget_in_a_day(paused)
  if redis.call('PTTL', paused) < 0 then redis.call('PEXPIRE', paused, 86400000) end
end
