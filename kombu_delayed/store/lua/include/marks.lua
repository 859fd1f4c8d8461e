-- marks: decide whether two messages are the same.
-- needs: nothing
-- The sender does not matter: the tag is new each time, and a restarted program has another origin and another queue
-- for replies.
local function without_sender(text)
  for _, name in ipairs({'delivery_tag', 'origin', 'reply_to'}) do
    text = text:gsub('"' .. name .. '": ?"[^"]*"', '', 1)
  end
  return text
end

-- The marks of a message that is compressed, or is compared with one: its front, ETA, retries, deliveries, and a digest
-- of the rest, which message/compressing.py makes from the text without these.
local function marks_of(text)
  local front, head, digest = text:match('^(.{.-)"headers": {"lang"(.-)}, "x%-zstd": "........(........)[^"]*"')
  local retries = '"group_index": ?[^,"{}]*, ?"retries": ?'
  if not digest then
    front, head = text:match('^(.{.-)("body": .*)$')
    local rest = without_sender(head or ''):gsub('"eta": ?"[^"\\]*"', '', 1)
    rest = rest:gsub('(' .. retries .. ')%d+', '%10', 1):gsub(', ?"deliveries": ?%d+}$', '}')
    digest = redis.sha1hex(rest):sub(1, 8)
  end
  head = head or ''
  return table.concat({
    front or '', head:match('"eta": ?("[^"\\]*")') or '', head:match(retries .. '(%d+)') or '0',
    text:match(', ?"deliveries": ?(%d+)}$') or '', digest,
  }, '\0')
end
