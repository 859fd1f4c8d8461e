-- reschedule: give delayed messages another due time; a time in the past makes them ready.
-- Idempotent.
-- keys: partitions delayed messages duplicates unique unique_due wake events moved ready...
-- arguments: now partition_size:number steps whole event_limit:number entries...
--   whole: 1: an id selects all messages that share it, 0: one member
--   entries: id, due_ms (or +delay_ms), eta in ISO 8601 (or empty); …
-- include: clock waiting ready buckets earliest backlog events moved of_queue expiry unique_gone reschedule
-- returns as text how many were moved, for each id; O(log n) a message
local counts = {}
for i = 1, #entries, 3 do counts[#counts + 1] = reschedule(entries[i], entries[i + 1], entries[i + 2]) end
announce_rescheduled()
return table.concat(counts, ' ')
