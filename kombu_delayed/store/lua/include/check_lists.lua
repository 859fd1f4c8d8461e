-- check_lists: raise an error if another program has overwritten the key of a ready list, before any message moves.
-- needs: ready
local function check_lists()
  for _, list in ipairs(ready) do redis.call('LLEN', list) end
end
