-- notes: facts that are kept under a name for a time, as JSON. After clock.
-- needs: expectations expectations_until now
local EARLIER_LIMIT = 10  -- how many earlier answers a note keeps

local function keep_until(kind, times, name, facts, until_ms)
  facts.until_ms = until_ms
  redis.call('HSET', kind, name, cjson.encode(facts))
  redis.call('ZADD', times, string.format('%.0f', until_ms), name)
  redis.call('PERSIST', kind)  -- older code set an expiry, and a server may evict keys that have one
  redis.call('PERSIST', times)
end

local function forget(kind, times, name)
  redis.call('HDEL', kind, name)
  redis.call('ZREM', times, name)
end

-- The facts under a name; nil if there are none, or they have expired or are damaged.
local function facts_of(kind, name)
  local text = redis.call('HGET', kind, name)
  local readable, facts = pcall(cjson.decode, text or '')
  local is_whole = text and readable and type(facts) == 'table' and type(facts.until_ms) == 'number'
  return is_whole and facts.until_ms > now_ms and facts or nil
end

-- Each call removes a few expired notes.
local function clear_past(kind, times)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', times, '-inf', now_ms, 'LIMIT', 0, 10)) do
    forget(kind, times, name)
  end
end

-- The answers that came after the timeouts of the last messages of a name. A consumer may still have such a message, and
-- its end must stay the same. `note` is the present one, and the next one is for the message `id`.
local function earlier_answers(note, id)
  local found = {}
  for _, each in ipairs(note and note.earlier or {}) do
    if each.until_ms > now_ms then found[#found + 1] = each end
  end
  if note and note.answer and note.id ~= id then
    found[#found + 1] = {id = note.id, answer = note.answer, until_ms = note.until_ms}
  end
  if #found > EARLIER_LIMIT then table.remove(found, 1) end
  return found[1] and found
end

-- `before` is the present note.
local function note_settled(before, name, id, state, answer_id, kept_ms)
  local earlier = earlier_answers(before, id)
  local note = {state = state, id = id, answer_id = answer_id, at_ms = now_ms, earlier = earlier}
  keep_until(expectations, expectations_until, name, note, now_ms + kept_ms)
end
