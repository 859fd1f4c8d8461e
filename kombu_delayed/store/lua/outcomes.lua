-- outcomes: read the outcomes of some tasks.
-- Read-only.
-- keys: outcomes absent
-- arguments: now ids...
-- include: clock outcomes
-- returns for each id that is known: id, text, 1 if the worker that had it last is alive; O(1) an id
local answer = {}
for _, id in ipairs(ids) do
  if id ~= '' then add_outcome(answer, id) end  -- the field '' is not a task: it has the age of a hash
end
return answer
