-- keep_slots: restore the slots of a consumer's messages if the server has lost them.
-- Idempotent: a message that has slots gets no more.
-- keys: consumers gate
-- arguments: now consumer entries...
--   entries: tag, id, |limit:key*slots|…; …
-- include: clock
-- returns 1, or 0 if the consumer has no lease; O(1) a slot
redis.call('ZREM', consumers, '')  -- a full server accepts writes only after a script has freed memory
if not redis.call('ZSCORE', consumers, consumer) then return 0 end
for i = 1, #entries, 3 do
  local tag, id, slots = entries[i], entries[i + 1], entries[i + 2]
  if slots:find('|running%20task:', 1, true) then slots = id .. '@' .. string.format('%.0f', now_ms) .. slots end
  if redis.call('HSETNX', gate .. 'slots:' .. consumer, tag, slots) == 1 then
    for limit, cost in slots:gmatch('|([^|*]+)%*(%d+)') do redis.call('HINCRBY', gate .. 'slots', limit, cost) end
  end
end
return 1
