-- reschedule_once: give delayed messages another due time, each id once per job; a time in the past makes them ready.
-- Idempotent for as long as the ledger is kept, even if the new time was computed from the old one.
-- keys: partitions delayed messages duplicates unique unique_due wake events job ledgers_until moved ready...
-- arguments: now partition_size:number steps whole event_limit:number run attempt ledger_seconds:number entries...
--   job: HASH id -> 1: the job has moved it, 0: it was not delayed; run -> how many it moved; attempt -> how many entries it had
--   whole: 1: an id selects all messages that share it, 0: one member
--   run: field of the ledger that counts what this run has moved
--   attempt: field that counts the entries of this attempt, done before or not; empty: they are not counted
--   entries: id, due_ms (or +delay_ms), eta in ISO 8601 (or empty); …
-- include: clock waiting ready buckets earliest backlog events moved of_queue expiry unique_gone reschedule past_ledgers ledger
-- returns as text how many were moved, for each id; O(log n) a message
local counts, total = {}, 0
together = {}
begin_ledger(entries, 3)
for i = 1, #entries, 3 do
  local id, count = entries[i], 0
  if claim_in_ledger(id) then
    count = reschedule(id, entries[i + 1], entries[i + 2])
    if count == 0 then note_in_ledger(id, 0) end
  end
  counts[#counts + 1] = count
  total = total + count
end
count_done(total, #entries / 3, run, attempt)
tell_together(job_name('reschedule'))
keep_ledger()
drop_past_ledgers(ledgers_until)
announce_rescheduled()
return table.concat(counts, ' ')
