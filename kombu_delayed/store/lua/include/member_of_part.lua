-- member_of_part: a member of `headers` or `properties` as text, or ''. The body is a string with escaped quotes, so
-- nothing in it is mistaken for the member. Few messages need this, so it is included only where it is called.
-- needs: nothing
local function member_of_part(message, part, name)
  -- The text of a JSON string that begins at `at`, unescaped; nil if none begins there.
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

  -- The slow way, if the fast one cannot decide.
  local function decoded()
    local readable, content = pcall(cjson.decode, message:match('{%s*".*'))
    local members = readable and type(content) == 'table' and content[part]
    return type(members) == 'table' and plain(members[name]) or ''
  end

  local _, from = message:find('"' .. part .. '":', 1, true)
  local _, at = message:find('"' .. name .. '":', from or 1, true)
  if not from or not at then return '' end
  -- In a string the quote would be escaped. So another object begins here, and the member may be part of it.
  local inner = message:find('{"', from + 3, true)
  if inner and inner < at then return decoded() end
  local text = string_at(at + 1)
  if text then return text end
  text = message:match('^ ?(-?[%w.]+)', at + 1)
  if text then return text == 'null' and '' or text end
  return decoded()
end
