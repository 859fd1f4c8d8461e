-- ready_find: read the messages that came to a ready list after a given one, and some messages by their positions.
-- Read-only.
-- keys: list
-- arguments: newest limit:number around:number looks...
--   newest: SHA-1 of the newest message that the caller knows; empty: it knows none
--   limit: how many new messages to read at most
--   around: how far from its place a message is searched
--   looks: for each message its place at that time, and its id as JSON; -1: the caller does not know the place, and only
--     the last messages are searched, because workers put messages back there
-- returns {length, how many messages are new or -1 if there are too many, place or -1 and message for each look,
--   the new messages, …}; O(limit), O(around) a look, and a step for each 8 kB of the list before its place
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
local IDS = {id = true, message_id = true, delivery_tag = true}
-- Tasks also contain the ids of the tasks that have sent them.
local function has_id(message, id)
  local from, to = message:find(id, 1, true)
  while from do
    if IDS[message:sub(math.max(from - 30, 1), from - 1):match('"([%a_]+)"%s*:%s*$')] then return true end
    from, to = message:find(id, to + 1, true)
  end
end
local function among(messages, from, id)
  for i, message in ipairs(messages) do
    if has_id(message, id) then return {from + i - 1, message} end
  end
end
local function look(from, to, id) return among(redis.call('LRANGE', list, from, to), from, id) end
local tail, last = math.max(length - around, 0), nil
local answer = {length, since}
for i = 1, #looks, 2 do
  local at, id, found = tonumber(looks[i]), looks[i + 1], nil
  if since >= 0 and length > 0 then
    if at >= 0 then
      local place = at + since
      found = look(place, place, id) or look(math.max(place - around, 0), place + around, id)
    end
    if not found then
      last = last or redis.call('LRANGE', list, tail, length)
      found = among(last, tail, id)
    end
  end
  answer[#answer + 1] = found and found[1] or -1
  answer[#answer + 1] = found and found[2] or ''
end
if since >= 0 then
  for _, message in ipairs(fresh) do answer[#answer + 1] = message end
end
return answer
