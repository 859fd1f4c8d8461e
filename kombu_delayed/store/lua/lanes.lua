-- lanes: read the lanes of a gate, a few per call. Read-only.
-- keys: gate absent
-- arguments: cursor count:number pattern
--   count: about how many lanes to read
--   pattern: of the names of lanes, as in HSCAN
-- returns {the next cursor, '0' at the end, lane, the limit that it waits for or empty, messages in it, due time of the first
--   one, …}; O(count · log n)
local page = redis.call('HSCAN', gate .. 'lanes', cursor, 'MATCH', pattern, 'COUNT', count)
local answer = {page[1]}
for i = 1, #page[2], 2 do
  local line = gate .. 'lane:' .. page[2][i]
  local due_ms = redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2]
  if due_ms then
    local at = #answer
    answer[at + 1], answer[at + 2], answer[at + 3] = page[2][i], page[2][i + 1], redis.call('ZCARD', line)
    answer[at + 4] = string.format('%.0f', math.floor(tonumber(due_ms)))
  end
end
return answer
