-- earliest: when the first message of the backlog is due.
-- needs: partitions delayed
local function earliest()
  local first = redis.call('ZRANGE', partitions, 0, 0)[1]
  return first and tonumber(redis.call('ZRANGE', delayed .. first, 0, 0, 'WITHSCORES')[2])
end
