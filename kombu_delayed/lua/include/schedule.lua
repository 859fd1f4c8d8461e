-- schedule: messages on their way into the backlog, or into ready where they are due, after clock ready backlog events.
-- needs: now ready steps wake partitions messages partition_size expires_ms events event_limit
local before = earliest()
local first
local counts = {0, 0, 0}

-- `due` is in ms since the epoch, or + and ms from now. Returns false for what was there already.
local function schedule(id, due, record)
  local due_ms = tonumber(due)
  local is_relative = due:sub(1, 1) == '+'
  if is_relative then due_ms = now_ms + due_ms end
  if due_ms <= now_ms then
    local list = list_for(record:sub(1, 1))
    redis.call('LPUSH', list, record:sub(2))
    if expires_ms > 0 then redis.call('PEXPIRE', list, expires_ms) end
    counts[2] = counts[2] + 1
  elseif put(id, due_ms, record, partition_size, is_relative) then
    if not first or due_ms < first then first = due_ms end
    counts[1] = counts[1] + 1
    tell('scheduled', id, record, due_ms)
  else
    counts[3] = counts[3] + 1
    return false
  end
  return true
end

local function announce_scheduled()
  if first then announce_due(first, before) end
  if expires_ms > 0 then redis.call('PEXPIRE', events, expires_ms) end
  if counts[2] > 0 then announce_ready() end
end
