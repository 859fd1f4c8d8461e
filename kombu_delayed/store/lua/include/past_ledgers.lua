-- past_ledgers: ledgers of jobs go when their time is past, some of them a call. After clock.
-- needs: now
-- One that older code has written to since has an expiry, and goes by itself.
local function drop_ledger(job)
  if redis.call('PTTL', job) < 0 then redis.call('UNLINK', job) end
end

local function forget_ledger(ledgers_until, job)
  drop_ledger(job)
  redis.call('ZREM', ledgers_until, job)
end

local function drop_past_ledgers(ledgers_until)
  for _, job in ipairs(redis.call('ZRANGEBYSCORE', ledgers_until, '-inf', now_ms, 'LIMIT', 0, 100)) do
    forget_ledger(ledgers_until, job)
  end
end
