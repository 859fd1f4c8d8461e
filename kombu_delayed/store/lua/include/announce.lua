-- announce: put wake tokens for everything that can be claimed. After ready and backlog.
-- needs: ready gate
local function announce_all()
  if redis.call('EXISTS', gate .. 'turns', unpack(ready)) > 0 then announce_ready() end
  local next_ms = earliest()
  if next_ms then announce_due(next_ms) end
  local look_ms = redis.call('ZRANGE', gate .. 'looks', 0, 0, 'WITHSCORES')[2]
  if look_ms then announce_due(tonumber(look_ms)) end
end
