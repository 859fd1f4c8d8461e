-- leave: a consumer stops in good order: release what it holds, pass its promise on, end its lease.
-- Twice is safe; call it until it returns 0.
-- keys: partitions delayed messages duplicates wake armed consumers unacked held granted_by events gate ready...
-- arguments: now consumer steps limit:number event_limit:number running...
--   running: tags of messages whose tasks go on: with their slots its lease stays, too
-- include: clock waiting ready events unacked backlog announce gate slots expiry
-- returns how many messages it still holds
redis.call('ZREM', wake, '', '>' .. consumer)  -- a full server lets a script write that has freed memory first
local left = give_back_some(limit, 0, 'released') + free_some(limit, running)
if left > 0 then return left end
if (redis.call('GET', armed) or ''):match(' (.-)%*?$') == consumer then redis.call('DEL', armed) end
if redis.call('EXISTS', slots_held) == 0 then redis.call('ZREM', consumers, consumer) end
if redis.call('EXISTS', consumers) == 0 then redis.call('DEL', granted_by) end
redis.call('PERSIST', consumers)  -- those who are left let it expire, unless their code is older and cannot
if redis.call('EXISTS', of_queue('ledgers-until')) == 1 then  -- whose requests are over may have no other consumer
  -- include: past_ledgers
  drop_past_ledgers(of_queue('ledgers-until'))
end
announce_all()
expire_as_noted()
return 0
