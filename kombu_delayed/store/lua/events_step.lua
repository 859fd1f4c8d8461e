-- events_step: how far so many lifecycle events reach, without returning them.
-- keys: events
-- arguments: after upto limit
--   after: those behind this id …
--   upto: … and not behind this one
--   limit: look at so many
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
