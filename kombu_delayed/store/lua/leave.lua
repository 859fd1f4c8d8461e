-- leave: a consumer stops in good order: release what it holds, pass its promise on, end its lease.
-- Twice is safe; call it until it returns 0.
local partitions  = KEYS[1]             -- ZSET partition -> lower bound of its due times
local delayed     = KEYS[2]             -- what the partitions' keys begin with
local messages    = KEYS[3]             -- HASH id -> priority step + due_ms + message
local duplicates  = KEYS[4]             -- HASH id -> how many messages share it
local wake        = KEYS[5]             -- ZSET token -> when to claim
local armed       = KEYS[6]             -- STRING "due_ms consumer": who has promised to claim then
local consumers   = KEYS[7]             -- ZSET consumer -> end of its lease
local unacked     = KEYS[8]             -- HASH tag -> priority step + message, of this consumer
local held        = KEYS[9]             -- ZSET tag -> tag, while they are given back
local granted_by  = KEYS[10]            -- STRING run id of the server by whose clock leases end
local events      = KEYS[11]            -- STREAM of lifecycle events
local gate        = KEYS[12]            -- what the keys of the gate begin with
local ready       = {unpack(KEYS, 13)}  -- LIST per priority step
local consumer    = ARGV[1]
local steps       = ARGV[2]
local limit       = tonumber(ARGV[3])
local event_limit = tonumber(ARGV[4])   -- about so many are kept; 0: none
local running     = {unpack(ARGV, 5)}   -- tags of messages whose tasks go on: with their slots its lease stays, too
-- include: waiting ready events unacked backlog announce gate slots expiry
-- returns how many messages it still holds
redis.call('ZREM', wake, '', '>' .. consumer)  -- a full server lets a script write that has freed memory first
local left = give_back_some(limit, 0, 'released') + free_some(limit, running)
if left > 0 then return left end
if (redis.call('GET', armed) or ''):match(' (.*)$') == consumer then redis.call('DEL', armed) end
if redis.call('EXISTS', slots_held) == 0 then redis.call('ZREM', consumers, consumer) end
if redis.call('EXISTS', consumers) == 0 then redis.call('DEL', granted_by) end
redis.call('PERSIST', consumers)  -- those who are left let it expire, unless their code is older and cannot
announce_all()
expire_as_noted()
return 0
