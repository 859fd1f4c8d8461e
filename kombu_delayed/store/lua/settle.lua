-- settle: record how a message that waited for an answer has ended, before anything follows from that.
-- Idempotent: the first end counts, and gets the same result again.
-- keys: expectations expectations_until absent
-- arguments: now name id state kept_ms:number
--   state: answered, failed or timed_out
--   kept_ms: how long the end stays recorded
-- include: clock notes
-- returns 1, or 0 if it has ended in another way, so that this message is a copy; or the answer, a string of JSON, that
--   came after the timeout and before this call; O(log n)
redis.call('ZREM', expectations_until, '')  -- a full server accepts writes only after a script has freed memory
local note = facts_of(expectations, name)
if not note then return 1 end
if note.id ~= id then  -- the name has another message now
  for _, each in ipairs(note.earlier or {}) do
    if each.id == id and state == 'timed_out' then return each.answer end
  end
  return 1
end
if note.answer and state == 'timed_out' then
  if note.state == 'open' then
    note.state, note.at_ms = note.ends, now_ms
    keep_until(expectations, expectations_until, name, note, now_ms + kept_ms)
  end
  return note.answer
end
if note.state ~= 'open' then return note.state == state and 1 or 0 end
note_settled(note, name, id, state, nil, kept_ms)
return 1
