-- pause: whether a queue is paused, by its note, after clock. A note is `from until JSON`: without an end until is 0. When
-- that has passed, it is since when the queue goes on.
-- needs: nothing
local function is_paused_by(note)
  local until_ms = tonumber(note:match('^%d+ (%d+) '))
  return until_ms == 0 or until_ms > now_ms, until_ms
end
