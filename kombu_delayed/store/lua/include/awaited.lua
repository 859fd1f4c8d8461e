-- awaited: messages that wait for an answer. After backlog and notes.
-- needs: unique unique_due messages
local NO_ANSWER = '"delayed_answer": ?null'

-- The member and the record of the message that waits under a name and has no answer yet. It may outlast its note,
-- because it can be rescheduled to a later time. A copy from a backup, of a message that has ended, does not count.
local function open_message(name, note)
  local member = redis.call('HGET', unique, name) or note and note.id
  local kept = member and bucket_get(messages, member)
  if not (kept and parts_of(kept) and kept:find(NO_ANSWER)) then return nil end
  local has_ended = note and (note.state ~= 'open' or note.answer) and note.id == id_of_field(member)
  if not has_ended then return member, kept end
end

local function take_open(name, member)
  take(member)
  forget(unique, unique_due, name)
end

-- The message with `answer`, a string of JSON, and with its due time in front, as if it had been promoted.
local function with_answer(message, answer)
  local first, last = message:find(NO_ANSWER)
  return string.format('{"due_ms":%.0f,', now_ms) .. message:sub(2, first - 1)
    .. '"delayed_answer": ' .. answer .. message:sub(last + 1)
end
