-- spread: the number of shards of a queue for a job; it stays the same during the job.
-- Twice is safe: the first number holds for as long as the ledger is kept.
-- keys: job ledgers_until absent
-- arguments: now ledger_seconds:number count
--   job: HASH id -> what the job has done with it; \31shards -> over how many it spreads the queue
--   count: over how many the queue is spread now
-- include: clock past_ledgers ledger
-- returns the number; O(log n)
begin_ledger({}, 1)
redis.call('HSETNX', job, '\31shards', count)
keep_ledger()
return tonumber(redis.call('HGET', job, '\31shards'))
