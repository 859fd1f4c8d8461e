-- promise: put tokens for the messages that a call leaves, and decide which consumer claims when the next one is due.
-- After clock waiting ready.
-- needs: wake armed consumer leased lease_ms waits
-- `answer` has the number of consumers in its fourth place, and gets a promise in its second.

-- A consumer that passes a promise on still claims this much later, because the one that got the token may be dead by
-- then. Its name in `armed` then has a star and binds no other consumer: one that got the token and claims before that
-- must make the promise itself.
local LOOK_AFTER_MS = 500

local function pass_on(answer, more, has_taken, next_ms)
  if more then
    announce_ready()
    answer[3] = 1
  elseif waits == '0' or next_ms then
    redis.call('ZREM', wake, 'now')
  else
    redis.call('ZREM', wake, 'now', 'due')
  end
  if waits == '0' then return end
  local promised_ms, holder, star = (redis.call('GET', armed) or ''):match('^(%d+) (.-)(%*?)$')
  promised_ms = tonumber(promised_ms)
  local free = not holder or star == '*' or holder == consumer or promised_ms <= now_ms
  -- A new consumer takes the promise over: the holder may have died. If it has not, it notices.
  if next_ms and (free or (leased == '0' and lease_ms > 0) or promised_ms > next_ms) then
    if has_taken and answer[4] > 1 then
      -- Its turn is over: the consumer that has waited longest is next.
      announce_due(next_ms)
      redis.call('SET', armed, string.format('%.0f %s*', next_ms, consumer))
      answer[2] = next_ms + LOOK_AFTER_MS
    else
      redis.call('SET', armed, string.format('%.0f %s', next_ms, consumer))
      answer[2] = next_ms
    end
  elseif holder == consumer then
    redis.call('DEL', armed)
  end
  if waits == '2' and not more then
    -- A token exists only while no consumer waits: one that begins to wait takes it.
    if redis.call('ZREM', wake, 'due') == 1 and next_ms then
      redis.call('SET', armed, string.format('%.0f %s', next_ms, consumer))
      answer[2] = next_ms
    end
    redis.call('ZADD', wake, 'NX', string.format('%.0f', 1e16 + now_ms), '>' .. consumer)
  end
end
