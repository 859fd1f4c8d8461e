-- outcomes: outcomes of some tasks.
-- Twice is safe: it only reads.
-- keys: outcomes absent
-- arguments: now ids...
-- include: clock outcomes
-- returns for each id that is known: id, text, 1 if the worker that had it last is alive; O(1) an id
local answer = {}
for i = 1, #ids do
  local text = ids[i] ~= '' and find_outcome(ids[i])  -- '' is no task: it tells how old a hash is
  if text then
    answer[#answer + 1] = ids[i]
    answer[#answer + 1] = text
    answer[#answer + 1] = is_alive(text)
  end
end
return answer
