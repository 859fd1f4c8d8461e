-- forget_duplicate: the last message but one that shared an id is gone. Seldom, so included where it is called.
-- needs: messages duplicates
local function forget_duplicate(member)
  local id = member:match('^(.*)\31%d+$')
  if not id then return end
  for n = 2, tonumber(redis.call('HGET', duplicates, id) or 1) do
    if bucket_has(messages, id .. '\31' .. n) then return end
  end
  redis.call('HDEL', duplicates, id)
end
