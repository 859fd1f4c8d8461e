-- cancel_expected: expect nothing any more: drop the message that waits for an answer. One that comes is late.
-- Twice is safe.
-- keys: partitions delayed messages duplicates unique unique_due expectations expectations_until events
-- arguments: now event_limit:number name kept_ms:number
--   kept_ms: how long it is known afterwards how it ended
-- include: clock buckets backlog events notes awaited
-- returns {member, priority step + due_ms + message}, or {} where nothing is expected; O(log n)
local member, kept = open_message(name, facts_of(expectations, name))
if not member then return {} end
local _, due_ms = parts_of(kept)
take_open(name, member)
note_settled(name, id_of_field(member), 'cancelled', nil, kept_ms)
tell('cancelled', member, kept, due_ms)
return {member, kept}
