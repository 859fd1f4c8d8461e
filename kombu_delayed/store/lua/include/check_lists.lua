-- check_lists: before anything moves to the ready lists or from them, a key that another program has overwritten refuses
-- it, while all is where it was.
-- needs: ready
local function check_lists()
  for _, list in ipairs(ready) do redis.call('LLEN', list) end
end
