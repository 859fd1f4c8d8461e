-- drop_ledgers: drop parts of the ledger of a job before they expire.
-- Idempotent.
-- keys: ledgers_until absent
-- arguments: ledgers...
-- returns how many there were; O(ledgers): the server frees their memory in another thread
local count = 0
for _, ledger in ipairs(ledgers) do
  count = count + redis.call('UNLINK', ledger)
  redis.call('ZREM', ledgers_until, ledger)
end
return count
