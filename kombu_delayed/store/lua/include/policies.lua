-- policies: whether the caller applies the policies that are declared for the queue. After of_queue.
-- needs: wake consumer consumers declared
local function has_others()
  return (redis.call('HGET', of_queue('policies'), 'version') or '') ~= declared
end

local function refused()
  redis.call('ZREM', wake, '>' .. consumer)
  return {now_ms, 0, 4, redis.call('ZCARD', consumers)}
end
