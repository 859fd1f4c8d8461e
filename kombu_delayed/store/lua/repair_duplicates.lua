-- repair_duplicates: look for ids that several messages are said to share, and none does; forget them.
-- Twice is safe: what is shared stays as it is.
-- keys: messages duplicates
-- arguments: cursor count:number fixes
--   fixes: 1: forget them, 0: only say which
-- returns {the next cursor, '0' at the end, ids looked at, bytes read, id, 'duplicate', …}; O(messages that share them)
local function is_shared(id, highest)
  for n = 2, highest do
    if redis.call('HEXISTS', messages, id .. '\31' .. n) == 1 then return true end
  end
  return false
end

local page = redis.call('HSCAN', duplicates, cursor, 'COUNT', count)
local answer = {page[1], #page[2] / 2, 0}
for i = 1, #page[2], 2 do
  local id = page[2][i]
  if not is_shared(id, tonumber(page[2][i + 1]) or 1) then
    if fixes == '1' then redis.call('HDEL', duplicates, id) end
    answer[#answer + 1], answer[#answer + 2] = id, 'duplicate'
  end
end
return answer
