-- together: run read-only commands at one instant on a server that refuses MULTI, as a full server does.
-- Read-only.
-- keys: keys...
-- arguments: commands...
--   commands: for each: how many parts it has, its name, the number of its key, and the rest
-- returns the answer of each command; O(what they read)
local answers, at = {}, 1
while at < #commands do
  local count = tonumber(commands[at])
  local key = keys[tonumber(commands[at + 2])]
  answers[#answers + 1] = redis.call(commands[at + 1], key, unpack(commands, at + 3, at + count))
  at = at + count + 1
end
return answers
