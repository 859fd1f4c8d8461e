-- past_ledgers: drop expired ledgers of jobs, a few per call. After clock.
-- needs: now
-- A slice is needed while its job continues, no matter when a row was last added to it. Returns the time until which it
-- is needed, or nil if it is not: an older job of that name may have left it.
local function needed_until(ledgers_until, slice, its_ms)
  local queue = ledgers_until:sub(1, -#'ledgers-until' - 1)
  local front = queue .. 'job-slice:'
  if slice:sub(1, #front) ~= front then return nil end
  local job = queue .. 'job:' .. slice:sub(#front + #'000:' + 1)
  local until_ms = tonumber(redis.call('ZSCORE', ledgers_until, job) or nil)
  if not until_ms or until_ms <= now_ms then return nil end
  local sliced_ms = tonumber(redis.call('HGET', job, '\31sliced') or nil)
  return sliced_ms and its_ms > sliced_ms and until_ms or nil
end

-- A ledger that older code has written to since has an expiry and needs no drop.
local function drop_ledger(job)
  if redis.call('PTTL', job) < 0 then redis.call('UNLINK', job) end
end

local function forget_ledger(ledgers_until, job)
  drop_ledger(job)
  redis.call('ZREM', ledgers_until, job)
end

local function drop_past_ledgers(ledgers_until)
  local past = redis.call('ZRANGEBYSCORE', ledgers_until, '-inf', now_ms, 'WITHSCORES', 'LIMIT', 0, 100)
  for i = 1, #past, 2 do
    local until_ms = needed_until(ledgers_until, past[i], tonumber(past[i + 1]))
    if until_ms then
      redis.call('ZADD', ledgers_until, until_ms, past[i])
    else
      forget_ledger(ledgers_until, past[i])
    end
  end
end
