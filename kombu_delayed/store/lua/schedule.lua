-- schedule: keep messages in the backlog until they are due; messages that are already due become ready.
-- Idempotent for a due time: the same message with the same id is kept once.
-- keys: partitions delayed messages duplicates wake events moved dictionaries ready...
-- arguments: now partition_size:number bucket_bytes:number steps expires_ms:number event_limit:number dictionary entries...
--   entries: id, due_ms, priority step + due_ms + message (or +delay_ms, priority step + message); …  A record may be packed.
--   dictionary: the version of the dictionary that compresses some records; empty: none is compressed
-- include: clock waiting ready check_lists buckets bucket_add earliest backlog gather events moved of_queue expiry schedule
-- returns as text: delayed, ready, already there, and 1 if records should be packed from now on; or the text plain if
--   nothing was done, because the queue does not have that dictionary or is not large: send the messages uncompressed;
--   O(log n) a message
if dictionary ~= '' then
  -- include: dictionary
  if not takes_compressed() then return 'plain' end
end
for i = 1, #entries, 3 do schedule(entries[i], entries[i + 1], entries[i + 2]) end
announce_scheduled()
return table.concat(counts, ' ')
