-- cancel_expected: end an expectation: drop the message that waits for an answer. An answer that comes then is late.
-- Idempotent.
-- keys: partitions delayed messages duplicates unique unique_due expectations expectations_until events
-- arguments: now event_limit:number name kept_ms:number
--   kept_ms: how long its end stays recorded
-- include: clock buckets backlog events notes awaited
-- returns {member, priority step + due_ms + message}, or {} if nothing is expected; O(log n)
local note = facts_of(expectations, name)
local member, kept = open_message(name, note)
if not member then return {} end
local _, due_ms = parts_of(kept)
take_open(name, member)
note_settled(note, name, id_of_field(member), 'cancelled', nil, kept_ms)
tell('cancelled', member, kept, due_ms)
return {member, kept}
