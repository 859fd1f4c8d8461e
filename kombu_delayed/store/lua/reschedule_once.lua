-- reschedule_once: give delayed messages another due time, each id once a job; one that has come makes them ready.
-- Twice is safe for as long as the ledger is kept, also where the time was counted from the one before.
local partitions     = KEYS[1]             -- ZSET partition -> lower bound of its due times
local delayed        = KEYS[2]             -- what the partitions' keys begin with
local messages       = KEYS[3]             -- HASH id -> priority step + due_ms + message
local duplicates     = KEYS[4]             -- HASH id -> how many messages share it
local wake           = KEYS[5]             -- ZSET token -> when to claim
local events         = KEYS[6]             -- STREAM of lifecycle events
local job            = KEYS[7]             -- HASH id -> 1: the job has moved it, 0: it was not delayed; run -> how many it moved
local ledgers_until  = KEYS[8]             -- ZSET key of a job's ledger -> when it may go
local moved          = KEYS[9]             -- ZSET member -> when it came to another place
local ready          = {unpack(KEYS, 10)}  -- LIST per priority step
local now            = ARGV[1]
local partition_size = tonumber(ARGV[2])
local steps          = ARGV[3]
local whole          = ARGV[4]             -- 1: an id stands for all messages that share it, 0: for one member
local event_limit    = tonumber(ARGV[5])   -- about so many are kept; 0: none
local run            = ARGV[6]             -- field of the ledger that counts what this run has moved
local ledger_seconds = tonumber(ARGV[7])
local entries        = {unpack(ARGV, 8)}   -- id, due_ms (or +delay_ms), eta in ISO 8601 (or empty); …
-- include: clock waiting ready backlog events moved expiry reschedule past_ledgers ledger
-- returns as text how many were moved, for each id; O(log n) a message
local counts, total = {}, 0
begin_ledger()
for i = 1, #entries, 3 do
  local id, count = entries[i], 0
  if redis.call('HSETNX', job, id, 1) == 1 then
    count = reschedule(id, entries[i + 1], entries[i + 2])
    if count == 0 then redis.call('HSET', job, id, 0) end
  end
  counts[#counts + 1] = count
  total = total + count
end
redis.call('HINCRBY', job, run, total)
keep_ledger()
drop_past_ledgers(ledgers_until)
announce_rescheduled()
return table.concat(counts, ' ')
