-- outcomes: the outcomes of tasks, one text for each id, in hashes of bounded size.
-- needs: outcomes
-- An id is in one of 32 buckets of one of three tables: `live` for tasks that have not ended, `failed` for tasks that
-- have failed at least once, `ended` for the rest. So many successes push out no failure and no running task. A bucket
-- is two hashes. When the newer one is full or old it replaces the older one, so that no scan is needed.
local TABLES = {'live', 'failed', 'ended'}

local function bucket_of(id)
  return tonumber(redis.sha1hex(id):sub(1, 2), 16) % 32
end

-- The hashes of a bucket, in the order in which they are searched. Most do not exist, which a call checks once.
local hashes = {}
local function hashes_of(bucket)
  if hashes[bucket] then return hashes[bucket] end
  local found = {}
  for i = 1, 3 do
    local newer = outcomes .. TABLES[i] .. ':' .. bucket
    for _, key in ipairs({newer, newer .. ':old'}) do
      if redis.call('EXISTS', key) == 1 then found[#found + 1] = key end
    end
  end
  hashes[bucket] = found
  return found
end

local function find_outcome(id)
  for _, key in ipairs(hashes_of(bucket_of(id))) do
    local text = redis.call('HGET', key, id)
    if text then return text end
  end
end

-- Whether the last worker that had the task is alive: 1 or 0.
local function is_alive(text)
  local last
  for worker in text:gmatch('%["[rs]",%d+,%d+,"([^"]*)"') do last = worker end
  local until_ms = last and redis.call('ZSCORE', outcomes .. 'workers', last)
  return until_ms and tonumber(until_ms) > now_ms and 1 or 0
end

-- Appends to `answer` the id, if it is known, its text, and whether that worker is alive.
local function add_outcome(answer, id)
  local text = find_outcome(id)
  if text then
    answer[#answer + 1] = id
    answer[#answer + 1] = text
    answer[#answer + 1] = is_alive(text)
  end
end
