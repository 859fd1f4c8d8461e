-- events: what happens to messages is told in a stream that readers follow.
-- needs: events event_limit
local EVENT_VERSION = 1

-- A member of the headers or properties, as text; '' where there is none. In the body, which is text
-- itself, quotes are escaped, so nothing there is taken for it.
local function text_of(message, name, from)
  local _, stop = message:find('"' .. name .. '":', from, true)
  if not stop then return '' end
  local text = message:match('^ ?"([^"\\]*)"', stop + 1)
  if text then return text end
  text = message:match('^ ?(-?[%w.]+)', stop + 1)
  if text then return text == 'null' and '' or text end
  local readable, content = pcall(cjson.decode, message:match('{%s*".*'))  -- it has characters that are escaped
  local headers = readable and type(content) == 'table' and content.headers
  local value = type(headers) == 'table' and headers[name]
  return type(value) == 'string' and value or ''
end

-- A record does as well as a message. Without an id the message's own is told. An error here must not
-- stop a move half way.
local function tell(event, id, message, due_ms, consumer, deliveries)
  if event_limit == 0 then return end
  local from = message:find('"headers":', 1, true) or 1
  if id then
    id = id:match('^(.*)\31%d+$') or id  -- what the backlog calls one of several that share it
  else
    id = text_of(message, 'id', from)
    if id == '' then id = text_of(message, 'message_id') end
    if id == '' then id = text_of(message, 'delivery_tag') end
  end
  redis.pcall('XADD', events, 'MAXLEN', '~', event_limit, '*', 'v', EVENT_VERSION, 'event', event, 'id', id,
    'task', text_of(message, 'task', from), 'tenant', text_of(message, 'tenant', from),
    'due_ms', due_ms or '', 'consumer', consumer or '', 'deliveries', deliveries or 0)
end

-- Where it has been promoted, a message begins with when it was due.
local function promoted_ms(message)
  return message:match('^.?{"due_ms": ?(%d+)') or ''
end

-- How often it was delivered in vain. What others wrote there may be of any length; the bound is one that
-- JSON and `..` write out in full.
local function deliveries_of(message)
  return math.min(tonumber(message:match(', ?"deliveries": ?(%d+)}$') or 0), 1e9)
end
