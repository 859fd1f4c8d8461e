-- cancel: drop delayed messages.
-- Twice is safe: what is not delayed any more stays where it is.
local partitions  = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed     = KEYS[2]            -- what the partitions' keys begin with
local messages    = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates  = KEYS[4]            -- HASH id -> how many messages share it
local wake        = KEYS[5]            -- ZSET token -> when to claim
local events      = KEYS[6]            -- STREAM of lifecycle events
local whole       = ARGV[1]            -- 1: an id stands for all messages that share it, 0: for one member
local reads       = ARGV[2]            -- 1: return what was dropped, 0: count it
local event_limit = tonumber(ARGV[3])  -- about so many are kept; 0: none
local ids         = {unpack(ARGV, 4)}
-- include: backlog events
-- returns for each id how many were there, or all of {member, priority step + due_ms + message, …};
--   O(log n) a message
local counts, dropped = {}, {}
for i, id in ipairs(ids) do
  counts[i] = 0
  local members = whole == '1' and members_of(id) or {id}
  for n = #members, 1, -1 do  -- in this order the others that share an id are found at once
    local member = members[n]
    local due_ms, kept = take(member)
    if due_ms then
      counts[i] = counts[i] + 1
      tell('cancelled', member, kept, due_ms)
      if reads == '1' then dropped[#dropped + 1], dropped[#dropped + 2] = member, kept end
    end
  end
end
return reads == '1' and dropped or counts
