-- override: whether the numbers set for a limit at run time still apply. After clock. They are
-- `slots ms burst until JSON`, where until is 0 if there is no end.
-- needs: nothing
local function holds_still(override)
  local until_ms = tonumber(override:match('^%S+ %S+ %S+ (%d+) ') or 1)
  return until_ms == 0 or until_ms > now_ms, until_ms
end
