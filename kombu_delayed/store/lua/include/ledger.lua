-- ledger: what a job has done with which id. It has no expiry, as a server may evict what has one; but that of a queue
-- that has an expiry itself does. When another one may go is kept beside it. After clock and past_ledgers.
-- needs: job ledgers_until ledger_seconds now
-- The first ids are in the job's own hash, later ones in one of 4,096 slices, each of which is kept and dropped as a
-- ledger of its own: no hash is so large that the server stands still when it goes. Older code has one hash for all.
local is_sliced, in_slices = false, 0
local slices = {}  -- those that this call looks at -> their number

local function begin(ledger)
  local until_ms = redis.call('ZSCORE', ledgers_until, ledger)
  redis.call('ZADD', ledgers_until, string.format('%.0f', now_ms + ledger_seconds * 1000), ledger)
  if until_ms and tonumber(until_ms) <= now_ms then drop_ledger(ledger) end
end

-- Of the job whose ledger it is: behind its name is what it does, where that is not to schedule.
local function job_name(operation)
  local name = job:sub(#ledgers_until - #'ledgers-until' + #'job:' + 1)
  return operation and name:match('^(.*):' .. operation .. '$') or name
end

-- Before it is read. A full server refuses the first write, before anything is done.
local function begin_ledger()
  begin(job)
  is_sliced = redis.call('HLEN', job) >= 512
end

local function slice_of(id)
  local number = redis.sha1hex(id):sub(1, 3)
  local queue = ledgers_until:sub(1, -#'ledgers-until' - 1)
  local slice = queue .. 'job-slice:' .. number .. ':' .. job:sub(#queue + #'job:' + 1)
  if not slices[slice] then
    begin(slice)
    slices[slice] = tonumber(number, 16)
  end
  return slice
end

-- What the job has done with each id that it has dealt with before.
local function done_with(ids)
  local done = {}
  for i, value in ipairs(redis.call('HMGET', job, unpack(ids))) do
    done[ids[i]] = value or is_sliced and redis.call('HGET', slice_of(ids[i]), ids[i])
  end
  return done
end

-- Returns whether the job has not dealt with the id before.
local function claim_in_ledger(id)
  if not is_sliced then return redis.call('HSETNX', job, id, 1) == 1 end
  if redis.call('HEXISTS', job, id) == 1 or redis.call('HSETNX', slice_of(id), id, 1) == 0 then return false end
  in_slices = in_slices + 1
  return true
end

-- For an id that has been claimed.
local function note_in_ledger(id, done)
  redis.call('HSET', is_sliced and slice_of(id) or job, id, done)
end

-- Slices that expire do so one after another: the server deletes what expires in its own thread.
local function keep(key, expires, later_ms)
  if not expires then
    redis.call('PERSIST', key)  -- older code has given it an expiry
  elseif redis.call('PTTL', key) < ledger_seconds * 1000 + later_ms then
    redis.call('PEXPIRE', key, ledger_seconds * 1000 + later_ms)
  end
end

-- When it has been written.
local function keep_ledger()
  local expires = redis.call('EXISTS', ledgers_until:sub(1, -#'ledgers-until' - 1) .. 'expires') == 1
  if in_slices > 0 then redis.call('HINCRBY', job, '\31in-slices', in_slices) end
  keep(job, expires, 0)
  keep(ledgers_until, expires, 0)
  for slice, number in pairs(slices) do keep(slice, expires, number * 20) end
end
