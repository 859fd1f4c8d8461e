-- spread: fix the number of shards of a queue for a job, so that it stays the same during the job.
-- Idempotent: the first number applies for as long as the ledger is kept.
-- keys: job ledgers_until absent
-- arguments: now ledger_seconds:number count
--   job: HASH id -> what the job has done with it; \31shards -> its number of shards of the queue
--   count: the number of shards of the queue now
-- include: clock past_ledgers ledger
-- returns the number; O(log n)
begin_ledger({}, 1)
redis.call('HSETNX', job, '\31shards', count)
keep_ledger()
return tonumber(redis.call('HGET', job, '\31shards'))
