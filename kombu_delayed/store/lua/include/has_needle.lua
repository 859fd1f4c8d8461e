-- has_needle: whether a message contains a text, or may contain it because it is compressed. After buckets.
-- needs: needle

-- A record need not be unpacked to search for a word that occurs in none of the texts that packing leaves out: the word
-- is within one part, or in the id, which packing leaves out too.
local LEFT_OUT = table.concat({
  '"lang": "py"', BEHIND_BODY, BEHIND_TASK, BEHIND_ID, BEHIND_ETA, NO_PARENT, ', "argsrepr": "', '", "kwargsrepr": "', '", "origin": "',
  BEHIND_ORIGIN, 'false true', NO_STAMPS, BEHIND_FLAGS, BEHIND_CORRELATION, BEHIND_REPLY, BEHIND_ROUTE,
})
local is_word = needle:find('^[%w_.@=-]+$') and not LEFT_OUT:find(needle, 1, true)

local function has_needle(field, record)
  if needle == '' or record:find(needle, 1, true) then return true end
  local _, forms = parts_of_packed(record)
  if not forms then return record:find(ZSTD, 1, true) end
  if forms:byte() == 122 then return true end
  return (is_word and field or unpacked(field, record)):find(needle, 1, true)
end
