-- events: record what happens to messages in a stream that readers follow.
-- needs: events event_limit
-- The stream expires, because nobody deletes the stream of an unused queue. Setting the expiry and trimming cost as
-- much as the entry, so the caller passes a negative `event_limit` if another call did both not long ago.
-- A job writes one entry for many messages. It collects them here: event, task and tenant -> ids and due times.
local together

local function append(version, name, text)
  if event_limit > 0 or not redis.pcall('XADD', events, 'NOMKSTREAM', '*', 'v', version, name, text) then
    event_limit = math.abs(event_limit)
    redis.pcall('XADD', events, 'MAXLEN', '~', event_limit, '*', 'v', version, name, text)
    redis.call('PEXPIRE', events, 7 * 86400000)
    event_limit = -event_limit
  end
end

-- Writes the entry of a job. Called once, at the end of a call that has set `together`.
local function tell_together(job)
  if #together == 0 then return end
  local kinds = {}
  for n, each in ipairs(together) do kinds[n] = each.of .. ',[' .. table.concat(each, ',') .. ']]' end
  append('3', 'events', '{"job":' .. cjson.encode(job) .. ',"events":[' .. table.concat(kinds, ',') .. ']}')
end

-- `message` may be a record too. Without `id`, the id of the message is used, or `name` if it has none. An error here
-- must not stop a move half way.
local function tell(event, id, message, due_ms, consumer, deliveries, name, reason)
  if event_limit == 0 then return end
  local _, from = message:find('"headers":', 1, true)
  local task, own_id, behind, tenant  -- most messages begin like Celery's, with text that needs no escapes in JSON
  if from then
    task, own_id, behind = message:match('^ ?{"lang": ?"py", ?"task": ?"([^"\\%c]*)", ?"id": ?"([^"\\%c]+)"()', from + 1)
  end
  local is_plain = task
  local at = task and message:find('tenant":', behind, true)
  if at then
    local inner = message:find('{"', behind, true)  -- another object begins here, and the tenant may be its member
    tenant = not (inner and inner < at) and message:match('^"tenant": ?"([^"\\%c]*)"', at - 1)
    is_plain = tenant
  end
  if not is_plain then
    -- include: member_of_part
    task, own_id = member_of_part(message, 'headers', 'task'), member_of_part(message, 'headers', 'id')
    if own_id == '' then own_id = member_of_part(message, 'properties', 'message_id') end
    if own_id == '' then own_id = member_of_part(message, 'properties', 'delivery_tag') end
    tenant = member_of_part(message, 'headers', 'tenant')
  end
  if not id then
    id = own_id ~= '' and own_id or name or ''
  elseif id ~= own_id then
    id = id:match('^(.*)\31%d+$') or id
  end
  consumer, deliveries = consumer or '', deliveries ~= 0 and deliveries or '0'  -- formatting a number costs as much as a command
  local due = 'null'
  if due_ms and due_ms ~= '' then
    local is_number = type(due_ms) == 'string' and #due_ms < 16 and due_ms:byte() > 48  -- a valid number in JSON
    due = is_number and due_ms or string.format('%.0f', math.min(due_ms, 2 ^ 53))
  end
  if together then
    local of = event .. '\31' .. task .. '\31' .. (tenant or '')
    local each = together[of]
    if not each then
      each = {of = cjson.encode({event, task, tenant or ''}):sub(1, -2)}
      together[of], together[#together + 1] = each, each
    end
    each[#each + 1] = is_plain and id == own_id and '"' .. id .. '"' or cjson.encode(id)
    each[#each + 1] = due
    return
  end
  local text
  if is_plain and id == own_id and not consumer:find('["\\%c]') then
    text = '["' .. event .. '","' .. id .. '","' .. task .. '","' .. (tenant or '') .. '",' .. due .. ',"' .. consumer .. '",' .. deliveries .. ']'
  else
    text = cjson.encode({event, id, task, tenant or ''}):sub(1, -2)
    text = text .. ',' .. due .. ',' .. cjson.encode(consumer) .. ',' .. deliveries .. ']'
  end
  if reason and reason ~= '' then text = text:sub(1, -2) .. ',' .. cjson.encode(reason) .. ']' end
  append('2', 'event', text)
end

-- The due time at the front of a promoted message, or ''.
local function promoted_ms(message)
  return message:match('^.?{"due_ms": ?(%d+)') or ''
end

-- How often a message was delivered in vain. Other programs may have written a number of any length there; the bound is
-- one that JSON and `..` write in full. Usually only the end is searched, because a message may be long.
local function deliveries_of(message)
  local last = message:byte(-2)
  if not last or last < 48 or last > 57 then return 0 end
  local text = message:sub(-60)
  if text:find('^%d+}$') then text = message end
  return math.min(tonumber(text:match(', ?"deliveries": ?(%d+)}$') or 0), 1e9)
end

-- `tell` for a message that a consumer holds or held.
local function tell_of_held(event, record, consumer, deliveries, name, reason)
  if event_limit == 0 then return end
  tell(event, nil, record, promoted_ms(record), consumer, deliveries or deliveries_of(record), name, reason)
end
