-- spread: over how many shards a job spreads a queue, whatever others do meanwhile.
-- Twice is safe: the first number holds for as long as the ledger is kept.
local job            = KEYS[1]            -- HASH id -> what the job has done with it; \31shards -> over how many it spreads the queue
local ledgers_until  = KEYS[2]            -- ZSET key of a job's ledger -> when it may go
local now            = ARGV[1]
local ledger_seconds = tonumber(ARGV[2])
local count          = ARGV[3]            -- over how many the queue is spread now
-- include: clock past_ledgers ledger
-- returns the number; O(log n)
begin_ledger()
redis.call('HSETNX', job, '\31shards', count)
keep_ledger()
return tonumber(redis.call('HGET', job, '\31shards'))
