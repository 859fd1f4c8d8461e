-- together: run commands that only read, as of one instant, where the server refuses MULTI: as a full one does.
-- Twice is safe: it only reads.
-- keys: keys...
-- arguments: commands...
--   commands: of each: how many parts it has, its name, the number of its key, and the rest
-- returns the answer to each; O(what they read)
local answers, at = {}, 1
while at < #commands do
  local count = tonumber(commands[at])
  local key = keys[tonumber(commands[at + 2])]
  answers[#answers + 1] = redis.call(commands[at + 1], key, unpack(commands, at + 3, at + count))
  at = at + count + 1
end
return answers
