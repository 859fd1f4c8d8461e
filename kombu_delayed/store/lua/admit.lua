-- admit: give messages that a consumer holds a ticket and let them wait at the gate, without what slots they had.
-- Twice is safe: what is not held any more stays where it is.
local partitions  = KEYS[1]            -- ZSET partition -> lower bound of its due times
local delayed     = KEYS[2]            -- what the partitions' keys begin with
local messages    = KEYS[3]            -- HASH id -> priority step + due_ms + message
local duplicates  = KEYS[4]            -- HASH id -> how many messages share it
local wake        = KEYS[5]            -- ZSET token -> when to claim
local unacked     = KEYS[6]            -- HASH tag -> priority step + message, of this consumer
local events      = KEYS[7]            -- STREAM of lifecycle events
local gate        = KEYS[8]            -- what the keys of the gate begin with
local ready       = {unpack(KEYS, 9)}  -- LIST per priority step
local now         = ARGV[1]
local consumer    = ARGV[2]
local steps       = ARGV[3]
local event_limit = tonumber(ARGV[4])  -- about so many are kept; 0: none
local limits      = ARGV[5]            -- as of deliver_gated
local entries     = {unpack(ARGV, 6)}  -- tag, ticket, record (empty: the one that is held); …
-- include: clock waiting ready backlog events gate limits slots waits
-- returns how many; O(log n) a message
redis.call('HDEL', unacked, '')        -- a full server lets a script write that has freed memory first
local tags, seen = {}, {}
for i = 1, #entries, 3 do
  local tag, ticket, record = entries[i], entries[i + 1], entries[i + 2]
  if record == '' then record = redis.call('HGET', unacked, tag) end
  if record and not seen[tag] then
    record = with_ticket(record, ticket)
    local _, id, place, lane = ticket_in(record)
    local member, kept = admit_new(record:sub(1, 1), record:sub(2), id, lane, place)
    note_arrival(member, kept, lane)
    tags[#tags + 1], seen[tag] = tag, true
  end
end
let_arrive()
if #tags > 0 then
  redis.call('HDEL', unacked, unpack(tags))
  free(tags)
end
tell_of_arrivals()
if redis.call('EXISTS', gate .. 'turns') == 1 then announce_ready() end
return #tags
