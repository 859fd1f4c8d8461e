-- clock: the time of this call, in ms since the epoch.
-- needs: now
local now_ms = tonumber(now)                 -- an absolute time, from tests
if not now_ms or now:sub(1, 1) == '+' then   -- the server's time, or that plus an offset
  local time = redis.call('TIME')
  now_ms = time[1] * 1000 + math.floor(time[2] / 1000) + (now_ms or 0)
end
