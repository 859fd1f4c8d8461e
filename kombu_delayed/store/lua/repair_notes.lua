-- repair_notes: scan a part of the notes of expectations, or of the early answers, and repair them.
-- Idempotent: intact entries do not change.
-- keys: notes notes_until messages unique unique_due absent
-- arguments: part cursor count:number fixes
--   notes: HASH name -> JSON: expectations, or answers
--   notes_until: ZSET name -> when its note is forgotten
--   part: the key whose names are scanned: notes or until
-- include: buckets bucket_scan repair
-- returns {the next cursor, '0' at the end, names scanned, bytes read, name, fault, …}, where a fault is note (a note
--   that cannot be read or has no time, or a time without a note) or unheard (the message waits, but no answer would
--   find it); O(count · log n)
local function note_of(name)
  local readable, note = pcall(cjson.decode, redis.call('HGET', notes, name) or '')
  local is_whole = readable and type(note) == 'table' and type(note.until_ms) == 'number'
    and type(note.at_ms) == 'number' and type(note.state) == 'string'
  return is_whole and note or nil
end

local function due_of(note)
  local kept = note.state == 'open' and bucket_get(messages, note.id or '')
  return kept and kept:match('^.(%d+)')
end

local function fault_of(name)
  local note = note_of(name)
  if not note or not redis.call('ZSCORE', notes_until, name) then return 'note' end
  return due_of(note) and redis.call('HEXISTS', unique, name) == 0 and 'unheard'
end

local function put_right(name)
  local note = note_of(name)
  if not note then
    redis.call('HDEL', notes, name)
    redis.call('ZREM', notes_until, name)
    return
  end
  redis.call('ZADD', notes_until, string.format('%.0f', note.until_ms), name)
  local due_ms = due_of(note)
  if due_ms and redis.call('HSETNX', unique, name, note.id) == 1 then redis.call('ZADD', unique_due, due_ms, name) end
end

if part == 'until' then return looked_through('ZSCAN', notes_until, fault_of, put_right) end
return looked_through('HSCAN', notes, fault_of, put_right)
