-- override: whether what was set for a limit at run time still holds, after clock. It is `slots ms burst until JSON`;
-- without an end until is 0.
-- needs: nothing
local function holds_still(override)
  local until_ms = tonumber(override:match('^%S+ %S+ %S+ (%d+) ') or 1)
  return until_ms == 0 or until_ms > now_ms, until_ms
end
