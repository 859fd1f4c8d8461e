-- forget_duplicate: forget that an id is shared when no duplicate is left. Rare, so included only where it is called.
-- needs: messages duplicates
local function forget_duplicate(member)
  local id = member:match('^(.*)\31%d+$')
  if not id then return end
  for n = 2, tonumber(redis.call('HGET', duplicates, id) or 1) do
    if bucket_has(messages, id .. '\31' .. n) then return end
  end
  redis.call('HDEL', duplicates, id)
end
