-- ledger: what a job has done with which id. It has no expiry, as a server may evict what has one; but that of a queue
-- that has an expiry itself does. When another one may go is kept beside it. After clock and past_ledgers.
-- needs: job ledgers_until ledger_seconds now
-- The first ids are in the job's own hash, later ones in one of 4,096 slices, each of which is kept and dropped as a
-- ledger of its own: no hash is so large that the server stands still when it goes. Older code has one hash for all.
local is_sliced, in_slices = false, 0
local slices = {}  -- those that this call looks at -> their number
local slice_of = {}  -- id -> the slice that it belongs to
local in_job = {}  -- id -> what the job's own hash has of it

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

-- Of the job whose ledger it is: behind its name is what it does, where that is not to schedule.
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

-- Before it is read; each entry begins with an id. A full server refuses the first write, before anything is done.
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

-- For an id that has been claimed.
local function note_in_ledger(id, done)
  redis.call('HSET', is_sliced and slice_of[id] or job, id, done)
end

-- Slices that expire do so one after another: the server deletes what expires in its own thread.
local function keep(key, expires, later_ms)
  if not expires then
    redis.call('PERSIST', key)  -- older code has given it an expiry
  elseif redis.call('PTTL', key) < ledger_seconds * 1000 + later_ms then
    redis.call('PEXPIRE', key, ledger_seconds * 1000 + later_ms)
  end
end

local function count_done(done, of, run, attempt)
  redis.call('HINCRBY', job, run, done)
  if attempt ~= '' and redis.call('HINCRBY', job, attempt, of) == of then redis.call('HINCRBY', job, '\31attempts', 1) end
end

-- When it has been written.
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
