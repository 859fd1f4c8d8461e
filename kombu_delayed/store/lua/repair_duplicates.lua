-- repair_duplicates: forget ids that are recorded as shared by several messages, but are not.
-- Idempotent: shared ids do not change.
-- keys: messages duplicates absent
-- arguments: cursor count:number fixes
-- include: buckets bucket_scan repair
-- returns {the next cursor, '0' at the end, ids scanned, bytes read, id, 'duplicate', …}; O(messages that share them)
local function fault_of(id)
  for n = 2, tonumber(redis.call('HGET', duplicates, id)) or 1 do
    if bucket_has(messages, id .. '\31' .. n) then return false end
  end
  return 'duplicate'
end

local function put_right(id)
  redis.call('HDEL', duplicates, id)
end

return looked_through('HSCAN', duplicates, fault_of, put_right)
