-- earliest: when the first message of the backlog is due.
-- needs: partitions delayed
-- A partition without members, which a server has evicted, is removed: otherwise nothing behind it would become due. If
-- there are many, the caller shall come again at once.
local function earliest()
  for _ = 1, 1000 do
    local first = redis.call('ZRANGE', partitions, 0, 0)[1]
    local due_ms = first and redis.call('ZRANGE', delayed .. first, 0, 0, 'WITHSCORES')[2]
    if due_ms or not first then return tonumber(due_ms) end
    redis.call('ZREM', partitions, first)
  end
  return 0
end
