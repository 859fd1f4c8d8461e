-- schedule: put messages into the backlog, or into ready if they are due. After clock ready check_lists backlog gather
-- events moved expiry.
-- needs: now ready steps wake partitions messages partition_size expires_ms events event_limit
local before = earliest()
local first
local counts = {0, 0, 0}
local is_job = false  -- the events of a job include messages that were due already, and how late they are

-- The message that a retry repeats was in the backlog under the same id.
local function is_retry(record)
  local _, at = record:find('"retries":', 1, true)
  return at and record:find('^ ?[1-9]', at + 1)
end

-- `due` is in ms since the epoch, and the record has it after its step; or it is + and ms from now, and the record has
-- no due time. Returns false for a message that was there already.
local function schedule(id, due, record)
  local is_relative = due:sub(1, 1) == '+'
  local due_ms = tonumber(due)
  if is_relative then
    due_ms = now_ms + due_ms
    due = string.format('%.0f', due_ms)
    record = with_due(record, due_ms)
  end
  local front, forms, from = parts_of_packed(record)
  if due_ms <= now_ms then
    if counts[2] == 0 then
      index_gathered()  -- otherwise, if a list refuses this message, the others would be in no partition
      check_lists()
    end
    local message = front and unpacked_behind('{', id, record, forms, from) or record:sub(#due + 2)
    if is_job then
      local was_due = due_ms > 0 and due  -- 0 means now
      tell('scheduled', id, message, was_due or nil)
      if was_due and message:byte() == 123 then message = '{"due_ms":' .. due .. ',' .. message:sub(2) end
    end
    redis.call('LPUSH', list_for(record:sub(1, 1)), message)
    counts[2] = counts[2] + 1
    return true
  end
  if not front and record:byte(#due + 2) ~= 123 then record = record:gsub('^(.%d+)%s+', '%1') end  -- promotion writes after the {
  local member = store(id, record, is_relative)
  if not member then
    counts[3] = counts[3] + 1
    return false
  end
  gather(member, due_ms)
  if least ~= record:byte() - 48 then
    -- include: urgent
    hint(member, record:byte(), due_ms)
  end
  if is_retry(record) then note_move(member) end
  if not first or due_ms < first then first = due_ms end
  counts[1] = counts[1] + 1
  if event_limit ~= 0 then tell('scheduled', id, front and head_of_packed(id, record, forms, from) or record, due) end
  return true
end

local function announce_scheduled()
  index_gathered()
  if first then announce_due(first, before) end
  if counts[2] > 0 then announce_ready() end
  if expires_ms > 0 then
    expire_as_declared(expires_ms, 0)
  elseif counts[2] > 0 then
    expire_as_noted()
  end
  counts[4] = layouts[messages] and layouts[messages].last > 0 and 1 or 0
end
