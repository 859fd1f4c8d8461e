-- repair_ledgers: look through a part of the ledgers for those that are past their time, and drop them.
-- Twice is safe: what is kept stays as it is.
local ledgers_until = KEYS[1]            -- ZSET key of a job's ledger -> when it may go
local now           = ARGV[1]
local cursor        = ARGV[2]            -- 0 at first
local count         = tonumber(ARGV[3])  -- look at so many, about
local fixes         = ARGV[4]            -- 1: put it right, 0: only say what is wrong
-- include: clock repair past_ledgers
-- returns {the next cursor, '0' at the end, ledgers looked at, 0, ledger, fault, …}, where the fault is past; O(count · log n)
local function fault_of(job)
  return tonumber(redis.call('ZSCORE', ledgers_until, job)) <= now_ms and 'past'
end

local function put_right(job)
  forget_ledger(ledgers_until, job)
end

return looked_through(redis.call('ZSCAN', ledgers_until, cursor, 'COUNT', count), fault_of, put_right)
