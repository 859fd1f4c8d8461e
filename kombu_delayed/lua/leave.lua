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
local events      = KEYS[10]            -- STREAM of lifecycle events
local ready       = {unpack(KEYS, 11)}  -- LIST per priority step
local consumer    = ARGV[1]
local steps       = ARGV[2]
local limit       = tonumber(ARGV[3])
local event_limit = tonumber(ARGV[4])   -- about so many are kept; 0: none
-- include: ready events unacked backlog announce
-- returns how many messages it still holds
redis.call('ZREM', wake, '')  -- a full server lets a script write that has freed memory first
local left = give_back_some(limit, 0, 'released')
if left > 0 then return left end
if (redis.call('GET', armed) or ''):match(' (.*)$') == consumer then redis.call('DEL', armed) end
redis.call('ZREM', consumers, consumer)
announce_all()
return 0
