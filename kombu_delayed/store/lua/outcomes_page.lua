-- outcomes_page: read the outcomes of the tasks of a list, the latest first.
-- Read-only.
-- keys: outcomes absent
-- arguments: now list start:number count:number
--   list: running, failed-ids, retrying or slow
-- include: clock outcomes
-- returns how many ids the list has from start on, up to count; then as outcomes.lua; O(log n + count)
local ids = redis.call('ZREVRANGE', outcomes .. list, start, start + count - 1)
local answer = {#ids}
for _, id in ipairs(ids) do add_outcome(answer, id) end
return answer
