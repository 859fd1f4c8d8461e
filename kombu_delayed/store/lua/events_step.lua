-- events_step: find how far a number of lifecycle events reaches, without returning them.
-- keys: events
-- arguments: after upto limit
--   after: events after this id …
--   upto: … up to and including this id
--   limit: how many events
-- returns {how many, id of the last one or `after`, how many were ever trimmed or -1 before Redis 7}; O(limit)
local function trimmed()
  if redis.call('EXISTS', events) == 0 then return -1 end
  local length, added = 0, -1
  local told = redis.call('XINFO', 'STREAM', events)
  for i = 1, #told, 2 do
    if told[i] == 'length' then length = told[i + 1] end
    if told[i] == 'entries-added' then added = told[i + 1] end
  end
  return added < 0 and -1 or added - length
end

local found = redis.call('XRANGE', events, '(' .. after, upto, 'COUNT', limit)
local last = found[#found]
return {#found, last and last[1] or after, trimmed()}
