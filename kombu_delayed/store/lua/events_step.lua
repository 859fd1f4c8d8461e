-- events_step: find how far a number of lifecycle events reaches, without returning them.
-- keys: events
-- arguments: after upto limit:number
--   after: events after this id …
--   upto: … up to and including this id
--   limit: how many events; fewer if they have many bytes, as those of a job's calls
-- returns {how many, id of the last one or `after`, how many were ever trimmed or -1 before Redis 7}; O(limit)
local AT_ONCE, MOST_BYTES = 20, 500000

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

local count, last, bytes, is_more = 0, after, 0, true
while is_more do
  local asked = math.min(AT_ONCE, limit - count)
  local found = redis.call('XRANGE', events, '(' .. last, upto, 'COUNT', asked)
  for _, entry in ipairs(found) do
    local fields = entry[2]
    last, count, bytes = entry[1], count + 1, bytes + #fields[#fields]
  end
  is_more = #found == asked and count < limit and bytes <= MOST_BYTES
end
return {count, last, trimmed()}
