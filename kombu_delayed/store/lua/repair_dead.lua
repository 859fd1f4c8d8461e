-- repair_dead: scan a part of the dead letters for incomplete ones, and repair them.
-- Idempotent: intact entries do not change.
-- keys: dead dead_messages dead_reasons absent
-- arguments: now part cursor count:number fixes
--   part: the key whose ids are scanned: dead, messages or reasons
-- include: clock buckets bucket_scan repair
-- returns {the next cursor, '0' at the end, ids scanned, bytes read, id, fault, …}, where a fault is dead-lost (a
--   letter without its message) or dead-orphan (a message without its time or its note); O(count · log n)
local function note_of(id)
  local text = bucket_get(dead_reasons, id)
  local readable, note = pcall(cjson.decode, text or '')
  if not readable or type(note) ~= 'table' then return nil end
  local whole = type(note.at_ms) == 'number' and type(note.deliveries) == 'number'
  return whole and type(note.reason) == 'string' and type(note.consumer) == 'string' and note or nil
end

local function fault_of(id)
  if part ~= 'messages' then return not bucket_has(dead_messages, id) and 'dead-lost' end
  return not (redis.call('ZSCORE', dead, id) and note_of(id)) and 'dead-orphan'
end

local function put_right(id, fault)
  if fault == 'dead-lost' then
    redis.call('ZREM', dead, id)
    bucket_drop(dead_reasons, id)
    return
  end
  local note, at_ms = note_of(id), tonumber(redis.call('ZSCORE', dead, id) or now_ms)
  if note then
    redis.call('ZADD', dead, note.at_ms, id)
  else
    note = {reason = 'why it was buried is lost', consumer = '', at_ms = at_ms, deliveries = 0}
    bucket_set(dead_reasons, id, cjson.encode(note))
    redis.call('ZADD', dead, at_ms, id)
  end
end

if part == 'dead' then return looked_through('ZSCAN', dead, fault_of, put_right) end
return looked_through('HSCAN', part == 'messages' and dead_messages or dead_reasons, fault_of, put_right)
