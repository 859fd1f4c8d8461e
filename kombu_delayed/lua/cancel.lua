-- cancel: drop delayed messages.
-- Twice is safe: what is not delayed any more stays where it is.
local partitions = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed    = KEYS[2]            -- what the partitions' keys begin with
local messages   = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates = KEYS[4]            -- HASH id -> how many messages share it
local wake       = KEYS[5]            -- ZSET token -> when to claim
local whole      = ARGV[1]            -- 1: an id stands for all messages that share it, 0: for one member
local ids        = {unpack(ARGV, 2)}
-- include: backlog
-- returns how many were there, for each id; O(log n) a message
redis.call('ZREM', wake, '')  -- a full server lets a script write that has freed memory first
local counts = {}
for i, id in ipairs(ids) do
  counts[i] = 0
  for _, member in ipairs(whole == '1' and members_of(id) or {id}) do
    if take(member) then counts[i] = counts[i] + 1 end
  end
end
return counts
