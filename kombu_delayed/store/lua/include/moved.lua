-- moved: record messages that moved to another place in the backlog, for readers that read it in many calls.
-- needs: moved
local MOVES_KEPT_US = 3600 * 1000000
local move_at

-- In µs by the server's clock, or the last number plus one if the clock has gone back.
local function next_move()
  local time = redis.call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  local last = redis.call('ZRANGE', moved, -1, -1, 'WITHSCORES')[2]
  local old = redis.call('ZCOUNT', moved, '-inf', now_us - MOVES_KEPT_US)
  if old > 0 then redis.call('ZREMRANGEBYRANK', moved, 0, math.min(old, 1000) - 1) end
  return string.format('%.0f', math.max(now_us, (tonumber(last) or 0) + 1))
end

local function note_move(member)
  local is_first = not move_at
  move_at = move_at or next_move()
  redis.call('ZADD', moved, move_at, member)
  if is_first then redis.call('PEXPIRE', moved, MOVES_KEPT_US / 1000) end
end
