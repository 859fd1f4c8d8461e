-- expect: schedule a message that waits for an answer until its timeout. If the answer has already arrived, the message
-- is ready at once, with the answer. Idempotent: an id expects a name once, even if that has ended since.
-- keys: partitions delayed messages duplicates wake unique unique_due expectations expectations_until answers
-- keys: answers_until events ready...
-- arguments: now partition_size:number bucket_bytes:number steps event_limit:number name id record timeout_ms:number kept_ms:number
--   record: priority step + message, with the header delayed_answer null
--   kept_ms: how long its end stays recorded
-- include: clock waiting ready buckets bucket_add earliest backlog events unique notes awaited of_queue expiry
-- returns {'open', 'answered', 'failed', 'timed_out' or 'cancelled', or 'refused' because another one is open; the id
--   of the one that counts}; O(log n)
clear_past(expectations, expectations_until)
clear_past(answers, answers_until)
local note = facts_of(expectations, name)
local open = open_message(name, note)
if open then return {id_of_field(open) == id and 'open' or 'refused', id_of_field(open)} end
if note and note.id == id then return {note.ends or note.state == 'open' and 'timed_out' or note.state, id} end
if note and note.answer and note.state == 'open' then return {'refused', note.id} end

local early = facts_of(answers, name)
if early then
  redis.call('LPUSH', list_for(record:sub(1, 1)), with_answer(record:sub(2), early.answer))
  forget(answers, answers_until, name)
  note_settled(note, name, id, early.state, early.answer_id, kept_ms)
  announce_ready()
  expire_as_noted()
  return {early.state, id}
end

local before, due_ms = earliest(), now_ms + timeout_ms
local member = put(id, due_ms, record, partition_size, true)
announce_due(due_ms, before)
remember(name, member, due_ms)
note = {state = 'open', id = id, at_ms = now_ms, due_ms = due_ms, earlier = earlier_answers(note, id)}
keep_until(expectations, expectations_until, name, note, due_ms + kept_ms)
tell('scheduled', id, record, due_ms)
return {'open', id}
