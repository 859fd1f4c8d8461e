-- may_have: whether a message has a text, or may have it where it is compressed: then its reader finds out.
-- needs: nothing
local function may_have(message, text)
  return message:find(text, 1, true) or message:find('}, "x-zstd": "', 1, true)
end
