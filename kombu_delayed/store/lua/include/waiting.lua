-- waiting: give a new token to the consumer that has waited longest. If no consumer listens, the token stays.
-- Consumers wait here only on a Cluster, where no connection can block for the tokens of several slots.
-- needs: wake
local function tell_waiting(token, at_ms)
  local waiting = redis.call('ZRANGEBYSCORE', wake, 1e16, '+inf', 'LIMIT', 0, 1)[1]
  while waiting do
    local heard = redis.pcall('SPUBLISH', wake .. waiting, at_ms)
    if type(heard) == 'table' then heard = redis.pcall('PUBLISH', wake .. waiting, at_ms) end
    if type(heard) == 'table' then  -- this user may use no channels. Without the token, those who may will wake a consumer
      redis.call('ZREM', wake, token)
      return
    end
    redis.call('ZREM', wake, waiting)
    if heard > 0 then
      redis.call('ZREM', wake, token)
      return
    end
    waiting = redis.call('ZRANGEBYSCORE', wake, 1e16, '+inf', 'LIMIT', 0, 1)[1]
  end
end

local function announce_due(due_ms, earliest_before)
  if not earliest_before or due_ms < earliest_before then
    if redis.call('ZADD', wake, 'LT', due_ms, 'due') == 1 then
      tell_waiting('due', string.format('%.0f', due_ms))
    end
  end
end
