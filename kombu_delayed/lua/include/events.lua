-- events: what happens to messages is told in a stream that readers follow.
-- needs: events event_limit
local EVENT_VERSION = 1

-- Nobody deletes the stream of a queue that is not used any more.
local EVENTS_KEPT_MS = 7 * 86400000
local is_first_event = true

-- The text of a JSON string that begins behind `at`, its escapes undone; nil where none begins there.
local function string_at(message, at)
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
local function decoded(message, part, name)
  local readable, content = pcall(cjson.decode, message:match('{%s*".*'))
  local members = readable and type(content) == 'table' and content[part]
  return type(members) == 'table' and plain(members[name]) or ''
end

-- A member of `headers` or `properties` as text; '' where there is none. In the body, which is text itself,
-- quotes are escaped, so nothing there is taken for it.
local function member_of_part(message, part, name)
  local _, from = message:find('"' .. part .. '":', 1, true)
  local _, at = message:find('"' .. name .. '":', from or 1, true)
  if not from or not at then return '' end
  -- In a string the quote would be escaped: this begins another object, whose member it may be.
  local inner = message:find('{"', from + 3, true)
  if inner and inner < at then return decoded(message, part, name) end
  local text = string_at(message, at + 1)
  if text then return text end
  text = message:match('^ ?(-?[%w.]+)', at + 1)
  if text then return text == 'null' and '' or text end
  return decoded(message, part, name)
end

local function own_id(message)
  for _, place in ipairs({{'headers', 'id'}, {'properties', 'message_id'}, {'properties', 'delivery_tag'}}) do
    local id = member_of_part(message, place[1], place[2])
    if id ~= '' then return id end
  end
  return ''
end

-- A record does as well as a message. Without `id` it is the message's own, or `name` where it has none. An
-- error here must not stop a move half way.
local function tell(event, id, message, due_ms, consumer, deliveries, name)
  if event_limit == 0 then return end
  id = id or own_id(message)
  if id == '' then id = name or '' end
  redis.pcall('XADD', events, 'MAXLEN', '~', event_limit, '*', 'v', EVENT_VERSION, 'event', event,
    'id', id:match('^(.*)\31%d+$') or id, 'task', member_of_part(message, 'headers', 'task'),
    'tenant', member_of_part(message, 'headers', 'tenant'),
    'due_ms', due_ms or '', 'consumer', consumer or '', 'deliveries', deliveries or 0)
  if is_first_event then redis.call('PEXPIRE', events, EVENTS_KEPT_MS) end
  is_first_event = false
end

-- Where it has been promoted, a message begins with when it was due.
local function promoted_ms(message)
  return message:match('^.?{"due_ms": ?(%d+)') or ''
end

-- How often it was delivered in vain. What others wrote there may be of any length; the bound is one that
-- JSON and `..` write out in full. As a rule the end is enough: a message may be long.
local function deliveries_of(message)
  local text = message:sub(-60)
  if text:find('^%d+}$') then text = message end
  return math.min(tonumber(text:match(', ?"deliveries": ?(%d+)}$') or 0), 1e9)
end

-- Of a message that a consumer has or had.
local function tell_of_held(event, record, consumer, deliveries, name)
  if event_limit == 0 then return end
  tell(event, nil, record, promoted_ms(record), consumer, deliveries or deliveries_of(record), name)
end
