-- announce: wake tokens for all that can be claimed, after ready and backlog.
-- needs: ready
local function announce_all()
  if redis.call('EXISTS', unpack(ready)) > 0 then announce_ready() end
  local next_ms = earliest()
  if next_ms then announce_due(next_ms) end
end
