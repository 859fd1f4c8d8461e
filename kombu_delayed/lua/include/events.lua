-- events: what happens to messages is told in a stream that readers follow.
-- needs: events event_limit
local is_first_event = true
local event_limit_text = string.format('%.0f', event_limit)

-- A member of `headers` or `properties` as text; '' where there is none. In the body, which is text itself,
-- quotes are escaped, so nothing there is taken for it. What only this needs is in it: a server makes each
-- function at the top anew for every call.
local function member_of_part(message, part, name)
  -- The text of a JSON string that begins behind `at`, its escapes undone; nil where none begins there.
  local function string_at(at)
    local text = message:match('^ ?"([^"\\]*)"', at)
    if text then return text end
    local first = message:match('^ ?"()', at)
    local stop = first
    while stop do
      stop = message:find('["\\]', stop)
      if not stop then return nil end
      if message:sub(stop, stop) == '"' then
        local readable, texts = pcall(cjson.decode, '[' .. message:sub(first - 1, stop) .. ']')
        return readable and texts[1] or ''
      end
      stop = stop + 2
    end
  end

  local function plain(value)
    local hex = type(value) == 'table' and type(value.__value__) == 'table' and value.__value__.hex
    if type(hex) == 'string' then  -- as Kombu writes a UUID
      return (hex:gsub('^(%x%x%x%x%x%x%x%x)(%x%x%x%x)(%x%x%x%x)(%x%x%x%x)', '%1-%2-%3-%4-'))
    end
    return (type(value) == 'string' or type(value) == 'number') and tostring(value) or ''
  end

  -- The slow way, for what the fast one cannot tell.
  local function decoded()
    local readable, content = pcall(cjson.decode, message:match('{%s*".*'))
    local members = readable and type(content) == 'table' and content[part]
    return type(members) == 'table' and plain(members[name]) or ''
  end

  local _, from = message:find('"' .. part .. '":', 1, true)
  local _, at = message:find('"' .. name .. '":', from or 1, true)
  if not from or not at then return '' end
  -- In a string the quote would be escaped: this begins another object, whose member it may be.
  local inner = message:find('{"', from + 3, true)
  if inner and inner < at then return decoded() end
  local text = string_at(at + 1)
  if text then return text end
  text = message:match('^ ?(-?[%w.]+)', at + 1)
  if text then return text == 'null' and '' or text end
  return decoded()
end

-- A record does as well as a message. Without `id` it is the message's own, or `name` where it has none. An
-- error here must not stop a move half way.
local function tell(event, id, message, due_ms, consumer, deliveries, name, reason)
  if event_limit == 0 then return end
  local _, from = message:find('"headers":', 1, true)
  local task, own_id, behind, tenant  -- most messages begin as Celery's do, with what JSON needs no escapes for
  if from then
    task, own_id, behind = message:match('^ ?{"lang": ?"py", ?"task": ?"([^"\\%c]*)", ?"id": ?"([^"\\%c]+)"()', from + 1)
  end
  local is_plain = task and not message:find('tenant":', behind, true)
  if not is_plain then
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
  consumer, deliveries = consumer or '', deliveries or 0
  local due = due_ms and due_ms ~= '' and string.format('%.0f', math.min(due_ms, 2 ^ 53)) or 'null'
  local text
  if is_plain and id == own_id and not consumer:find('["\\%c]') then
    text = '["' .. event .. '","' .. id .. '","' .. task .. '","",' .. due .. ',"' .. consumer .. '",' .. deliveries .. ']'
  else
    text = cjson.encode({event, id, task, tenant or ''}):sub(1, -2)
    text = text .. ',' .. due .. ',' .. cjson.encode(consumer) .. ',' .. deliveries .. ']'
  end
  if reason and reason ~= '' then text = text:sub(1, -2) .. ',' .. cjson.encode(reason) .. ']' end
  -- Numbers would be written out anew for each event.
  redis.pcall('XADD', events, 'MAXLEN', '~', event_limit_text, '*', 'v', '2', 'event', text)
  -- Nobody deletes the stream of a queue that is not used any more.
  if is_first_event then redis.call('PEXPIRE', events, 7 * 86400000) end
  is_first_event = false
end

-- Where it has been promoted, a message begins with when it was due.
local function promoted_ms(message)
  return message:match('^.?{"due_ms": ?(%d+)') or ''
end

-- How often it was delivered in vain. What others wrote there may be of any length; the bound is one that
-- JSON and `..` write out in full. As a rule the end is enough: a message may be long.
local function deliveries_of(message)
  local last = message:byte(-2)
  if not last or last < 48 or last > 57 then return 0 end
  local text = message:sub(-60)
  if text:find('^%d+}$') then text = message end
  return math.min(tonumber(text:match(', ?"deliveries": ?(%d+)}$') or 0), 1e9)
end

-- Of a message that a consumer has or had.
local function tell_of_held(event, record, consumer, deliveries, name, reason)
  if event_limit == 0 then return end
  tell(event, nil, record, promoted_ms(record), consumer, deliveries or deliveries_of(record), name, reason)
end
