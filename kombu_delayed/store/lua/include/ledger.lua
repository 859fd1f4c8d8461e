-- ledger: what a job has done with which id. It has no expiry, as a server may evict what has one; but that of a queue
-- that has an expiry itself does. When another one may go is kept beside it. After clock and past_ledgers.
-- needs: job ledgers_until ledger_seconds now
-- Before it is read. A full server refuses the first write, before anything is done.
local function begin_ledger()
  local until_ms = redis.call('ZSCORE', ledgers_until, job)
  redis.call('ZADD', ledgers_until, string.format('%.0f', now_ms + ledger_seconds * 1000), job)
  if until_ms and tonumber(until_ms) <= now_ms then drop_ledger(job) end
end

-- When it has been written.
local function keep_ledger()
  local expires = redis.call('EXISTS', ledgers_until:sub(1, -#'ledgers-until' - 1) .. 'expires') == 1
  for _, key in ipairs({job, ledgers_until}) do
    if not expires then
      redis.call('PERSIST', key)  -- older code has given it an expiry
    elseif redis.call('PTTL', key) < ledger_seconds * 1000 then
      redis.call('EXPIRE', key, ledger_seconds)
    end
  end
end
