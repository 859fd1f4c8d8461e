-- pack: records of large hashes, without the text that all tasks of Celery have in common. message/packing.py packs the
-- records that are sent. A record is a priority step, maybe a due time, and JSON. Packed, it has \1 in place of the
-- brace, three letters for the texts that are left out of flags, eta and body, and nine parts, each after its length.
-- JSON has no character \1. Packed records must stay readable: another common text would need another character.
-- A message compressed by message/compressing.py has z as its first letter, and u as its second if its ETA is in UTC.
-- It has four parts: the text before its headers, the task, the text after the id in the headers, and the value of
-- "x-zstd", which is not parsed here.
-- needs: nothing
local LONGEST_PART = 65535
local PARTS = '>Hc0Hc0Hc0Hc0Hc0Hc0Hc0Hc0Hc0'

-- The end of a body after the arguments, in base64, which has one of three forms.
local BODY_ENDS = {
  a = 'LCB7ImNhbGxiYWNrcyI6IG51bGwsICJlcnJiYWNrcyI6IG51bGwsICJjaGFpbiI6IG51bGwsICJjaG9yZCI6IG51bGx9XQ==',
  b = 'eyJjYWxsYmFja3MiOiBudWxsLCAiZXJyYmFja3MiOiBudWxsLCAiY2hhaW4iOiBudWxsLCAiY2hvcmQiOiBudWxsfV0=',
  c = 'IHsiY2FsbGJhY2tzIjogbnVsbCwgImVycmJhY2tzIjogbnVsbCwgImNoYWluIjogbnVsbCwgImNob3JkIjogbnVsbH1d',
}
local BEHIND_BODY = '", "content-encoding": "utf-8", "content-type": "application/json", "headers": {"lang": "py", "task": "'
local BEHIND_TASK, BEHIND_ID = '", "id": "', '", "shadow": null, "eta": '
local BEHIND_ETA = '+00:00", "expires": null, "group": null, "group_index": null, "retries": 0, "timelimit": [null, null], "root_id": "'
local NO_PARENT = '", "parent_id": null'
local BEHIND_ORIGIN = '", "ignore_result": '
local FLAGS = {f = 'false', n = 'null', t = 'true'}
local NO_STAMPS = ', "replaced_task_nesting": 0, "stamped_headers": null, "stamps": {}'
local BEHIND_FLAGS, BEHIND_CORRELATION = '}, "properties": {"correlation_id": "', '", "reply_to": "'
local BEHIND_REPLY = '", "delivery_mode": 2, "delivery_info": {"exchange": "'
local BEHIND_ROUTE = ', "body_encoding": "base64", "delivery_tag": "'

local function id_of_field(field)
  return field:find('\31', 1, true) and field:match('^(.*)\31%d+$') or field
end

local HEADERS, ZSTD = '"headers": {"lang": "py", "task": "', '}, "x-zstd": "'

-- Packs a compressed message, if its id is that of the field.
local function packed_compressed(field, record)
  local front, before, task, id, head, frame, behind =
    record:match('^(.%d*){(.-)"headers": {"lang": "py", "task": "([^"]*)", "id": "([^"]*)"([^{}]*)}, "x%-zstd": "([^"]*)"(.*)$')
  if id ~= id_of_field(field) or math.max(#before, #task, #head, #frame) > LONGEST_PART then return record end
  local eta_form, eta, rest = '-', head:match('^, "eta": "([^"]*)%+00:00(".*)$')
  if eta then eta_form, head = 'u', eta .. rest end
  return front .. '\1z' .. eta_form .. '-' .. struct.pack('>Hc0Hc0Hc0Hc0', #before, before, #task, task, #head, head, #frame, frame) .. behind
end

-- Packs a record. Returns it unchanged if it has another form.
local function packed(field, record)
  local from = record:match('^.%d*{()')
  if not from then return record end
  if record:sub(from, from + 5) ~= '"body"' and record:find(ZSTD, from, true) then return packed_compressed(field, record) end
  local id, parts, at = id_of_field(field), {}, from
  for n, text in ipairs({
    BEHIND_BODY, BEHIND_TASK .. id .. BEHIND_ID, ', "argsrepr": "', '", "kwargsrepr": "', '", "origin": "', BEHIND_ORIGIN,
    BEHIND_FLAGS .. id .. BEHIND_CORRELATION, BEHIND_REPLY, BEHIND_ROUTE,
  }) do
    local first, last = record:find(text, at, true)
    if not first or first - at > LONGEST_PART then return record end
    parts[n], at = record:sub(at, first - 1), last + 1
  end
  local body, task, eta, args, kwargs, origin, flags, reply, route = unpack(parts)
  if task:find('\\', 1, true) then return record end
  local flags_form, eta_form, body_form = '-', '-', '-'
  local flag = FLAGS[flags:sub(1, 1)]
  if flag and flags:sub(1, #flag + #NO_STAMPS) == flag .. NO_STAMPS then
    flags, flags_form = flags:sub(#flag + #NO_STAMPS + 1), flags:sub(1, 1)
  end
  local usual = BEHIND_ETA .. id .. NO_PARENT
  if eta:sub(-#usual) == usual then eta, eta_form = eta:sub(1, -#usual - 1), 'u' end
  for form, text in pairs(BODY_ENDS) do
    if body:sub(-#text) == text then body, body_form = body:sub(1, -#text - 1), form end
  end
  return record:sub(1, from - 2) .. '\1' .. flags_form .. eta_form .. body_form
    .. struct.pack(PARTS, #task, task, #flags, flags, #eta, eta, #kwargs, kwargs, #origin, origin, #reply, reply,
      #route, route, #args, args, #body, body)
    .. record:sub(at)
end

-- The front of a packed record, the three letters as one string, and where the parts begin; nil if it is not packed.
local function parts_of_packed(record)
  return record:match('^(.%-?%d*)\1(...)()')
end

-- The text after the id in the headers of a compressed message.
local function head_of_compressed(forms, head)
  return forms:byte(2) == 117 and ', "eta": "' .. head:gsub('"', '+00:00"', 1) or head
end

-- `front`, then the text of a packed record after the brace.
local function unpacked_behind(front, field, record, forms, from)
  local id = id_of_field(field)
  if forms:byte() == 122 then
    local is_whole, before, task, head, frame, last = pcall(struct.unpack, '>Hc0Hc0Hc0Hc0', record, from)
    if not is_whole then return record end  -- it only begins like a packed one
    head = head_of_compressed(forms, head)
    return front .. before .. HEADERS .. task .. BEHIND_TASK .. id .. '"' .. head .. ZSTD .. frame .. '"' .. record:sub(last)
  end
  local is_whole, task, flags, eta, kwargs, origin, reply, route, args, body, last = pcall(struct.unpack, PARTS, record, from)
  if not is_whole then return record end
  local flag = FLAGS[forms:sub(1, 1)]
  if flag then flags = flag .. NO_STAMPS .. flags end
  if forms:byte(2) == 117 then eta = eta .. BEHIND_ETA .. id .. NO_PARENT end
  return front .. body .. (BODY_ENDS[forms:sub(3)] or '') .. BEHIND_BODY .. task .. BEHIND_TASK .. id .. BEHIND_ID .. eta
    .. ', "argsrepr": "' .. args .. '", "kwargsrepr": "' .. kwargs .. '", "origin": "' .. origin .. BEHIND_ORIGIN
    .. flags .. BEHIND_FLAGS .. id .. BEHIND_CORRELATION .. reply .. BEHIND_REPLY .. route .. BEHIND_ROUTE .. record:sub(last)
end

local function unpacked(field, record)
  local front, forms, from = parts_of_packed(record)
  return front and unpacked_behind(front .. '{', field, record, forms, from) or record
end

-- The part of a packed record that `tell` reads.
local function head_of_packed(field, record, forms, from)
  local task, flags = struct.unpack('>Hc0Hc0', record, from)
  if forms:byte() == 122 then
    task, flags = select(2, struct.unpack('>Hc0Hc0Hc0', record, from))
    flags = head_of_compressed(forms, flags)
  end
  if flags:find('[{\\]') then return unpacked(field, record) end
  return HEADERS .. task .. BEHIND_TASK .. id_of_field(field) .. '"' .. flags
end
