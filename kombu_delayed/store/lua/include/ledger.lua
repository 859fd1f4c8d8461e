-- ledger: records what a job has done with each id. A ledger has no expiry, because a server may evict keys that have
-- one. Only in a queue with an expiry does it expire. `ledgers_until` has the time when each ledger may be dropped.
-- After clock and past_ledgers.
-- needs: job ledgers_until ledger_seconds now
-- The first ids are in the job's own hash, later ones in one of 4,096 slices. Each slice is kept and dropped like a
-- ledger of its own, so that dropping a hash never blocks the server. Older code has one hash for all ids.
local is_sliced, in_slices = false, 0
local slices = {}  -- slice that this call uses -> its number
local slice_of = {}  -- id -> its slice
local in_job = {}  -- id -> its value in the job's own hash

local function begin(ledgers)
  local until_ms, entries = string.format('%.0f', now_ms + ledger_seconds * 1000), {}
  for i, ledger in ipairs(ledgers) do entries[2 * i - 1], entries[2 * i] = until_ms, ledger end
  local before = redis.call('ZMSCORE', ledgers_until, unpack(ledgers))
  redis.call('ZADD', ledgers_until, unpack(entries))
  for i, its_ms in ipairs(before) do
    its_ms = tonumber(its_ms or nil)
    if its_ms and its_ms <= now_ms and not needed_until(ledgers_until, ledgers[i], its_ms) then drop_ledger(ledgers[i]) end
  end
end

-- The name of the job of this ledger, without its operation, which follows the name unless it is to schedule.
local function job_name(operation)
  local name = job:sub(#ledgers_until - #'ledgers-until' + #'job:' + 1)
  return operation and name:match('^(.*):' .. operation .. '$') or name
end

local function find_slices(ids)
  local queue = ledgers_until:sub(1, -#'ledgers-until' - 1)
  local front, behind, found = queue .. 'job-slice:', ':' .. job:sub(#queue + #'job:' + 1), {}
  for _, id in ipairs(ids) do
    local number = redis.sha1hex(id):sub(1, 3)
    local slice = front .. number .. behind
    slice_of[id] = slice
    if not slices[slice] then
      slices[slice] = tonumber(number, 16)
      found[#found + 1] = slice
    end
  end
  begin(found)
end

-- Call this before the ledger is read. Each entry begins with an id. A full server refuses the first write here, before
-- any other change.
local function begin_ledger(entries, length)
  begin({job})
  is_sliced = #entries > 0 and redis.call('HLEN', job) >= 512
  if not is_sliced then return end
  local ids = {}
  for i = 1, #entries, length do ids[#ids + 1] = entries[i] end
  find_slices(ids)
  for i, value in ipairs(redis.call('HMGET', job, unpack(ids))) do in_job[ids[i]] = value end
end

-- Returns whether the job has not dealt with the id before.
local function claim_in_ledger(id)
  if not is_sliced then return redis.call('HSETNX', job, id, 1) == 1 end
  if in_job[id] or redis.call('HSETNX', slice_of[id], id, 1) == 0 then return false end
  in_slices = in_slices + 1
  return true
end

-- Records the result for an id that was claimed.
local function note_in_ledger(id, done)
  redis.call('HSET', is_sliced and slice_of[id] or job, id, done)
end

-- Slices expire one after another, because the server deletes expired keys in its main thread.
local function keep(key, expires, later_ms)
  if not expires then
    redis.call('PERSIST', key)  -- older code may have set an expiry
  elseif redis.call('PTTL', key) < ledger_seconds * 1000 + later_ms then
    redis.call('PEXPIRE', key, ledger_seconds * 1000 + later_ms)
  end
end

local function count_done(done, of, run, attempt)
  redis.call('HINCRBY', job, run, done)
  if attempt ~= '' and redis.call('HINCRBY', job, attempt, of) == of then redis.call('HINCRBY', job, '\31attempts', 1) end
end

-- Call this after the ledger is written.
local function keep_ledger()
  local expires = redis.call('EXISTS', ledgers_until:sub(1, -#'ledgers-until' - 1) .. 'expires') == 1
  if in_slices > 0 then
    redis.call('HINCRBY', job, '\31in-slices', in_slices)
    redis.call('HSETNX', job, '\31sliced', string.format('%.0f', now_ms))
  end
  keep(job, expires, 0)
  keep(ledgers_until, expires, 0)
  if expires then
    for slice, number in pairs(slices) do keep(slice, true, number * 20) end
  end
end
