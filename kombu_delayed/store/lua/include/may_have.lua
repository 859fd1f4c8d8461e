-- may_have: whether a message contains a text, or may contain it because it is compressed: then the reader checks.
-- needs: nothing
local function may_have(message, text)
  return message:find(text, 1, true) or message:find('}, "x-zstd": "', 1, true)
end
