-- respond: give a waiting message its answer, which makes it ready. If its timeout has passed and no consumer has settled
-- it yet, `settle` gives it the answer. An answer that no message expects yet is kept.
-- Idempotent: the same answer gets the same result again.
-- keys: partitions delayed messages duplicates wake unique unique_due expectations expectations_until answers
-- keys: answers_until events ready...
-- arguments: now steps event_limit:number name answer_id state answer kept_ms:number early_ms:number
-- arguments: early_limit:number
--   state: answered or failed
--   answer: a string of JSON
--   kept_ms: how long the end of the expectation stays recorded
--   early_ms: how long an early answer is kept; 0: not at all
--   early_limit: how many early answers are kept
-- include: clock waiting ready buckets backlog events notes awaited of_queue expiry
-- returns {'accepted', 'early', 'late', or 'unknown' or 'full' if it is not kept; id of the message or ''}; O(log n)
clear_past(expectations, expectations_until)
clear_past(answers, answers_until)
local note = facts_of(expectations, name)
if note and note.answer_id == answer_id then return {'accepted', note.id} end
if note and note.answer then return {'late', note.id} end

local member, kept = open_message(name, note)
if member then
  local step, _, message = parts_of(kept)
  take_open(name, member)
  tell('rescheduled', member, kept, now_ms, nil, nil, nil, state)
  redis.call('LPUSH', list_for(step), with_answer(message, answer))
  note_settled(note, name, id_of_field(member), state, answer_id, kept_ms)
  announce_ready()
  expire_as_noted()
  return {'accepted', id_of_field(member)}
end
if note and note.state == 'open' and note.due_ms and note.due_ms <= now_ms then
  note.answer_id, note.answer, note.ends = answer_id, answer, state
  keep_until(expectations, expectations_until, name, note, math.max(note.until_ms, now_ms + kept_ms))
  return {'accepted', note.id}
end
if note then return {'late', note.id} end  -- it has ended, or was removed from the backlog early

local early = facts_of(answers, name)
if early then return {early.answer_id == answer_id and 'early' or 'late', ''} end
if early_ms == 0 then return {'unknown', ''} end
if redis.call('HLEN', answers) >= early_limit then return {'full', ''} end
early = {state = state, answer_id = answer_id, answer = answer, at_ms = now_ms}
keep_until(answers, answers_until, name, early, now_ms + early_ms)
return {'early', ''}
