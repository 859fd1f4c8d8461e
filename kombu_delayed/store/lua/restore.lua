-- restore: put messages back into the backlog as a backup has them; the next deliver promotes those that are due.
-- Idempotent: a message that is there, with any due time, is kept once. But a message that got another name, because
-- its own was taken, is restored again when its name is free. With a ledger, a job restores each message once, even if
-- it has run since.
-- keys: partitions delayed messages duplicates wake events unique unique_due job ledgers_until
-- arguments: partition_size:number event_limit:number now bucket_bytes:number run attempt ledger_seconds:number entries...
--   job: HASH member -> 1: the job has restored it, 0: it was there; run -> how many it restored; attempt -> how many entries it had
--   run: field of the ledger that counts what this run has restored
--   attempt: field that counts the entries of this attempt, done before or not; empty: they are not counted
--   ledger_seconds: 0: no ledger
--   entries: member, priority step + due_ms + message, without due_ms (or empty) for one that is elsewhere in the queue; …
-- include: clock waiting buckets bucket_add earliest backlog gather events unique past_ledgers ledger
-- returns as text: restored, already done before; O(log n) a message
local before = earliest()
local first
local counts = {0, 0}
local has_ledger = ledger_seconds > 0
if has_ledger then
  together = {}
  begin_ledger(entries, 2)
end

local function without_eta(record)
  return (record:gsub('"eta": ?"[^"\\]*"', '', 1))
end

-- Gives a message its unique key, unless another message has it now. A retry does not block others.
local function claim_key(member, record, due_ms)
  if not record:find('_unique":', 1, true) then return end
  -- include: member_of_part
  local key = member_of_part(record, 'headers', 'delayed_unique')
  local retries = member_of_part(record, 'headers', 'retries')
  if key == '' or (retries ~= '' and retries ~= '0') then return end
  local other = redis.call('HGET', unique, key)
  if not other or not bucket_has(messages, other) then remember(key, member, due_ms) end
end

-- Returns the name of the message in the backlog, or nil if it was there already.
local function put_back(member, kept, due_ms)
  local id, n
  if member:find('\31', 1, true) then id, n = member:match('^(.*)\31(%d+)$') end
  if not bucket_add(messages, member, kept) then
    if bucket_get(messages, member) == kept then return nil end
    local step, _, message = parts_of(kept)
    for _, other in ipairs(members_of(id or member)) do
      local there = bucket_get(messages, other)
      if there and same(without_eta(there), without_eta(step .. message)) then return nil end
    end
    index_gathered()
    return put(id or member, due_ms, step .. message, partition_size, false)
  end
  gather(member, due_ms)
  if least ~= kept:byte() - 48 then
    -- include: urgent
    hint(member, kept:byte(), due_ms)
  end
  local highest = id and tonumber(redis.call('HGET', duplicates, id) or 1)
  if id and tonumber(n) > highest and tonumber(n) < 1e6 then
    redis.call('HSET', duplicates, id, n)
    has_duplicates = true
  end
  return member
end

for i = 1, #entries, 2 do
  local due = entries[i + 1]:match('^.(%d+)')
  local due_ms = tonumber(due)
  local is_known = has_ledger and not claim_in_ledger(entries[i])
  local member = due and not is_known and put_back(entries[i], entries[i + 1], due_ms)
  if member then
    claim_key(member, entries[i + 1], due_ms)
    if not first or due_ms < first then first = due_ms end
    counts[1] = counts[1] + 1
    tell('scheduled', entries[i], entries[i + 1], due)
  else
    counts[2] = counts[2] + 1
    if has_ledger and not is_known then note_in_ledger(entries[i], 0) end
  end
end
index_gathered()
if has_ledger then
  count_done(counts[1], #entries / 2, run, attempt)
  tell_together(job_name('restore'))
  keep_ledger()
  drop_past_ledgers(ledgers_until)
end
if first then announce_due(first, before) end
return table.concat(counts, ' ')
