-- schedule_once: schedule messages that a job has not dealt with before.
-- Idempotent for as long as the ledger is kept, even if the first copy has run since.
-- keys: partitions delayed messages duplicates wake events job ledgers_until moved dictionaries ready...
-- arguments: now partition_size:number bucket_bytes:number steps expires_ms:number event_limit:number run attempt ledger_seconds:number
-- arguments: dictionary entries...
--   job: HASH id -> 1: the job has made it, 0: it was there; run -> how many it made; attempt -> how many entries it had
--   run: field of the ledger that counts what this run has made
--   attempt: field that counts the entries of this attempt, done before or not; empty: they are not counted
--   entries: id, due_ms, priority step + due_ms + message (or +delay_ms, priority step + message); …  A record may be packed.
--   dictionary: the version of the dictionary that compresses some records; empty: none is compressed
-- include: clock waiting ready check_lists buckets bucket_add earliest backlog gather events moved of_queue expiry schedule past_ledgers ledger
-- returns as text: delayed, ready, already done before, and 1 if records should be packed from now on; or the text plain if
--   nothing was done, because the queue does not have that dictionary or is not large: send the messages uncompressed;
--   O(log n) a message
if dictionary ~= '' then
  -- include: dictionary
  if not takes_compressed() then return 'plain' end
end
is_job, together = true, {}
check_lists()  -- before an id counts as dealt with
begin_ledger(entries, 3)
for i = 1, #entries, 3 do
  local id = entries[i]
  if not claim_in_ledger(id) then
    counts[3] = counts[3] + 1
  elseif not schedule(id, entries[i + 1], entries[i + 2]) then
    note_in_ledger(id, 0)
  end
end
count_done(counts[1] + counts[2], #entries / 3, run, attempt)
announce_scheduled()
tell_together(job_name())
keep_ledger()  -- after the note of a declared expiry was written
drop_past_ledgers(ledgers_until)
return table.concat(counts, ' ')
