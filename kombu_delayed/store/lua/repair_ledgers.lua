-- repair_ledgers: scan a part of the ledgers for expired ones, and drop them.
-- Idempotent: needed entries do not change.
-- keys: ledgers_until absent
-- arguments: now cursor count:number fixes
-- include: clock buckets bucket_scan repair past_ledgers
-- returns {the next cursor, '0' at the end, ledgers scanned, bytes read, ledger, fault, …}, where the fault is past;
--   O(count · log n)
local function fault_of(job)
  local its_ms = tonumber(redis.call('ZSCORE', ledgers_until, job))
  return its_ms <= now_ms and not needed_until(ledgers_until, job, its_ms) and 'past'
end

local function put_right(job)
  forget_ledger(ledgers_until, job)
end

return looked_through('ZSCAN', ledgers_until, fault_of, put_right)
