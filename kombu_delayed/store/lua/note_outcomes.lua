-- note_outcomes: record what a worker has done with tasks.
-- Safe to repeat: readers ignore repeated lines.
-- keys: outcomes absent
-- arguments: now limit:number age_ms:number worker alive_ms:number entries...
--   limit: a table keeps the texts of about this many tasks, and of at most twice as many
--   age_ms: a text is kept at least this long, and at most twice as long
--   worker: the worker, which counts as alive for alive_ms from now on; empty: the caller is no worker
--   alive_ms: 0: the worker ends
--   entries: for each task: its id, and lines. The first one has its state ("r" received, "s" started, "b" back in its queue,
--     "+" succeeded, "-" failed, "~" will be retried, "x" any other end), the time of that or of the next attempt, and "slow" if it
--     was slow. The second one is the head of its text, and the others are added to it.
-- include: clock outcomes
-- returns how many tasks; O(1) a task
local TEXT_BYTES, INDEX_LIMIT, FIELDS = 6000, 2000, 2
local TABLE_OF = {r = 'live', s = 'live', b = 'live', ['-'] = 'failed', ['~'] = 'failed'}
local INDEX_OF = {s = 'running', ['-'] = 'failed-ids', ['~'] = 'retrying'}
local INDICES = {'running', 'failed-ids', 'retrying'}
local changed = {}

local function put(index, score, id)
  redis.call('ZADD', outcomes .. index, score, id)
  changed[index] = true
end

-- Keeps the first line and as many of the last ones as fit: at least one.
local function shortened(text)
  if #text <= TEXT_BYTES then return text end
  local head = text:find('\n', 1, true) or 0
  local from = head + 1
  while head + #text - from >= TEXT_BYTES do
    local next = text:find('\n', from, true)
    if not next or next == #text then break end
    from = next + 1
  end
  return text:sub(1, head) .. text:sub(from)
end

-- Whether a text belongs to another tenant's task: tenants may use the same ids, and the last text is kept. A process
-- that cancels an id may not know its task.
local function is_of_another(text, head)
  local first = text:match('^[^\n]*\n')
  if first == head then return false end
  local knows, known = pcall(cjson.decode, first or '')
  local is_readable, given = pcall(cjson.decode, head)
  if not (knows and is_readable) or type(known) ~= 'table' then return false end
  return given[2] ~= '' and known[2] ~= '' and known[3] ~= given[3]
end

-- All known texts are read at once, and at the end all texts are written at once, by hash.
local ids_in, bucket_by_id, texts, kept_in = {}, {}, {}, {}
for i = 1, #entries, FIELDS do
  local id = entries[i]
  local bucket = bucket_of(id)
  local ids = ids_in[bucket] or {}
  ids_in[bucket], ids[#ids + 1], bucket_by_id[id] = ids, id, bucket
end
for bucket, ids in pairs(ids_in) do
  for _, key in ipairs(hashes_of(bucket)) do
    for i, text in ipairs(redis.call('HMGET', key, unpack(ids))) do
      if text and not texts[ids[i]] then texts[ids[i]], kept_in[ids[i]] = text, key end
    end
  end
end

local goes_to = {}
for i = 1, #entries, FIELDS do
  local id = entries[i]
  local state, score, slow, head, lines = entries[i + 1]:match('^(%S+) (%-?%d+) (%a*)\n([^\n]*\n)(.*)$')
  local known, to = texts[id], TABLE_OF[state] or 'ended'
  local before = known and not is_of_another(known, head) and known
  if before and to == 'ended' and before:find('\n%["[-~]"') then to = 'failed' end
  if known then
    for j = 1, #INDICES do
      if INDICES[j] ~= INDEX_OF[state] then redis.call('ZREM', outcomes .. INDICES[j], id) end
    end
  end
  texts[id], goes_to[id] = shortened((before or head) .. lines), outcomes .. to .. ':' .. bucket_by_id[id]
  if INDEX_OF[state] then put(INDEX_OF[state], score, id) end
  if slow == 'slow' then put('slow', now_ms, id) end
end

local fields_of = {}
for id, key in pairs(goes_to) do
  if kept_in[id] and kept_in[id] ~= key then redis.call('HDEL', kept_in[id], id) end
  local fields = fields_of[key] or {}
  fields_of[key], fields[#fields + 1], fields[#fields + 2] = fields, id, texts[id]
end
for key, fields in pairs(fields_of) do
  redis.call('HSET', key, unpack(fields))
  local since = tonumber(redis.call('HGET', key, '') or '')
  if not since then
    since = now_ms
    redis.call('HSET', key, '', now_ms)
  end
  if redis.call('HLEN', key) > limit / 32 + 1 or now_ms - since > age_ms then
    redis.call('UNLINK', key .. ':old')
    redis.call('RENAME', key, key .. ':old')
    key = key .. ':old'
  end
  redis.call('PEXPIRE', key, age_ms)
end
for index in pairs(changed) do
  redis.call('ZREMRANGEBYRANK', outcomes .. index, 0, -INDEX_LIMIT - 1)
  redis.call('ZREMRANGEBYSCORE', outcomes .. index, '-inf', now_ms - 2 * age_ms)  -- their texts are gone
  redis.call('PEXPIRE', outcomes .. index, 2 * age_ms)
end
redis.call('SET', outcomes .. 'used', '1', 'PX', age_ms)  -- marks that outcomes of the queue are recorded
if worker ~= '' then
  redis.call('ZADD', outcomes .. 'workers', now_ms + alive_ms, worker)
  redis.call('ZREMRANGEBYSCORE', outcomes .. 'workers', '-inf', now_ms)
  redis.call('PEXPIRE', outcomes .. 'workers', age_ms)
end
return #entries / FIELDS
