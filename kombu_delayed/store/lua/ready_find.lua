-- ready_find: read the messages that came to a ready list after a given one, and one message by its position.
-- Twice is safe: it only reads.
-- keys: list
-- arguments: newest at:number limit:number around:number needle
--   newest: SHA-1 of the newest message that the caller knows; empty: it knows none
--   at: the place that the message with the needle then had; -1: the caller does not know it, and only the
--     last messages are looked at, where those are that workers have put back
--   limit: at most so many have come
--   around: so far from its place it is looked for
-- returns {length, how many have come or -1 where these are too many, place or -1, message, what has come, …};
--   O(limit + around), and a step for each 8 kB of the list before the place
local length, fresh = redis.call('LLEN', list), {}
local since = length == 0 and 0 or -1
for start = 0, newest == '' and -1 or math.min(limit, length) - 1, 50 do
  for i, message in ipairs(redis.call('LRANGE', list, start, math.min(start + 50, limit) - 1)) do
    if redis.sha1hex(message) == newest then
      since = start + i - 1
      break
    end
    fresh[#fresh + 1] = message
  end
  if since >= 0 then break end
end
local answer = {length, since, -1, ''}
local function look(from, to)
  for i, message in ipairs(redis.call('LRANGE', list, from, to)) do
    if message:find(needle, 1, true) then
      answer[3], answer[4] = from + i - 1, message
      return true
    end
  end
end
if since >= 0 then
  for i, message in ipairs(fresh) do answer[4 + i] = message end
  if at >= 0 then
    local place = at + since
    if not look(place, place) then look(math.max(place - around, 0), place + around) end
  end
  if answer[3] < 0 then look(math.max(length - around, 0), length) end
end
return answer
