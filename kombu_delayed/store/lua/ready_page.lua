-- ready_page: read a part of one ready list, from the end with the newest messages.
-- Read-only.
-- keys: list
-- arguments: start:number limit:number limit_bytes:number needles...
--   start: how many messages to skip from that end
--   limit_bytes: stop earlier after this many bytes
--   needles: return messages that contain one of these texts; none: all messages. Compressed ones are returned too
-- include: may_have
-- returns {how many were read, 1 if there may be more, place, message, …}; O(limit), and a step for each 8 kB of the list
--   before it
local answer, size, seen, more = {0, 0}, 0, 0, true
while more and seen < limit and size < limit_bytes do
  local at, count = start + seen, math.min(limit - seen, 50)
  local page = redis.call('LRANGE', list, at, at + count - 1)
  more = #page == count
  for i, message in ipairs(page) do
    size = size + #message
    local is_meant = #needles == 0
    for _, needle in ipairs(needles) do
      is_meant = is_meant or may_have(message, needle)
    end
    if is_meant then answer[#answer + 1], answer[#answer + 2] = at + i - 1, message end
  end
  seen = seen + #page
end
answer[1], answer[2] = seen, more and 1 or 0
return answer
