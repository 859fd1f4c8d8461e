-- schedule_once: schedule messages that a job has not dealt with before.
-- Twice is safe for as long as the ledger is kept, also where the first copy has run since.
local partitions     = KEYS[1]             -- ZSET partition -> lower bound of its due times
local delayed        = KEYS[2]             -- what the partitions' keys begin with
local messages       = KEYS[3]             -- HASH id -> priority step + due_ms + message
local duplicates     = KEYS[4]             -- HASH id -> how many messages share it
local wake           = KEYS[5]             -- ZSET token -> when to claim
local events         = KEYS[6]             -- STREAM of lifecycle events
local job            = KEYS[7]             -- HASH id -> 1: the job has made it, 0: it was there; run -> how many it made
local ledgers_until  = KEYS[8]             -- ZSET key of a job's ledger -> when it may go
local moved          = KEYS[9]             -- ZSET member -> when it came to another place
local ready          = {unpack(KEYS, 10)}  -- LIST per priority step
local now            = ARGV[1]
local partition_size = tonumber(ARGV[2])
local steps          = ARGV[3]
local expires_ms     = tonumber(ARGV[4])   -- of the ready lists; 0: never
local event_limit    = tonumber(ARGV[5])   -- about so many are kept; 0: none
local run            = ARGV[6]             -- field of the ledger that counts what this run has made
local ledger_seconds = tonumber(ARGV[7])
local entries        = {unpack(ARGV, 8)}   -- id, due_ms, priority step + due_ms + message (or +delay_ms, priority step + message); …
-- include: clock waiting ready backlog gather events moved expiry schedule past_ledgers ledger
-- returns as text: delayed, ready, already there or dealt with before; O(log n) a message
local ids, ledger, known = {}, {}, {}
begin_ledger()
for i = 1, #entries, 3 do ids[#ids + 1] = entries[i] end
for i, done in ipairs(redis.call('HMGET', job, unpack(ids))) do known[ids[i]] = done end
for i = 1, #entries, 3 do
  local id = entries[i]
  if known[id] then
    counts[3] = counts[3] + 1
  else
    known[id] = schedule(id, entries[i + 1], entries[i + 2]) and 1 or 0
    ledger[#ledger + 1], ledger[#ledger + 2] = id, known[id]
  end
end
if #ledger > 0 then redis.call('HSET', job, unpack(ledger)) end
redis.call('HINCRBY', job, run, counts[1] + counts[2])
announce_scheduled()
keep_ledger()  -- who declares an expiry has left a note of it now
drop_past_ledgers(ledgers_until)
return table.concat(counts, ' ')
