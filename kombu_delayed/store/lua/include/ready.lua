-- ready: the ready lists, one per priority step; as in Kombu, their head is the right end.
-- needs: ready steps wake
local function list_for(step)
  for i = #steps, 2, -1 do
    if steps:byte(i) <= step:byte() then return ready[i] end
  end
  return ready[1]
end

local function announce_ready()
  if redis.call('ZADD', wake, 0, 'now') == 1 then tell_waiting('now', '0') end
end
