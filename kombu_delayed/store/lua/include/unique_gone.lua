-- unique_gone: release the unique key of a message that leaves the backlog early. Messages that leave on time keep
-- theirs: senders of unique messages remove past keys.
-- needs: unique unique_due
local has_unique = redis.call('EXISTS', unique) == 1

local function forget_unique(member, kept)
  if not has_unique or not kept:find('"delayed_unique"', 1, true) then return end
  -- include: member_of_part
  local key = member_of_part(kept, 'headers', 'delayed_unique')
  if redis.call('HGET', unique, key) == member then
    redis.call('HDEL', unique, key)
    redis.call('ZREM', unique_due, key)
  end
end
