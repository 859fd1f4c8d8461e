-- leave: a consumer stops cleanly: release its messages, pass its promise on, end its lease.
-- Idempotent; call it until it returns 0.
-- keys: partitions delayed messages wake armed consumers unacked held granted_by events gate ready...
-- arguments: now consumer steps limit:number event_limit:number running
--   running: tags of messages whose tasks continue, separated by spaces: their slots stay, and with them the lease
-- include: clock waiting ready events unacked earliest announce gate slots of_queue expiry
-- returns how many messages it still holds
redis.call('ZREM', wake, '', '>' .. consumer)  -- a full server accepts writes only after a script has freed memory
local stay = running ~= '' and {''} or {}  -- the slots of a global limit have the number of a call under the empty name
for tag in running:gmatch('%S+') do stay[#stay + 1] = tag end
local left = give_back_some(limit, 0, 'released') + free_some(limit, stay)
if left > 0 then return left end
if (redis.call('GET', armed) or ''):match(' (.-)%*?$') == consumer then redis.call('DEL', armed) end
if redis.call('EXISTS', slots_held) == 0 then redis.call('ZREM', consumers, consumer) end
if redis.call('EXISTS', consumers) == 0 then redis.call('DEL', granted_by) end
local note_ms = redis.call('PTTL', of_queue('expires'))
if note_ms > 0 then leases_last_for(consumers, note_ms) else redis.call('PERSIST', consumers) end
if redis.call('EXISTS', of_queue('ledgers-until')) == 1 then  -- after the last request the queue may have no other consumer
  -- include: past_ledgers
  drop_past_ledgers(of_queue('ledgers-until'))
end
announce_all()
expire_as_noted()
return 0
