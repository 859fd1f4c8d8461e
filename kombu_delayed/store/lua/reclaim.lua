-- reclaim: put messages of a consumer whose lease has expired back to the heads of their ready lists.
-- Idempotent; call it until nothing is left.
-- keys: partitions delayed messages wake armed consumers unacked held dead dead_messages dead_reasons
-- keys: unique_held unique_until events gate ready...
-- arguments: now bucket_bytes:number consumer steps limit:number max_deliveries:number dead_limit:number dead_age_ms:number
-- arguments: event_limit:number ended_ms
--   consumer: the dead consumer
--   max_deliveries: 0: any number
--   ended_ms: the end of the lease that the caller found expired; empty: any time in the past
-- include: clock waiting ready buckets bucket_add events unacked earliest announce dead unique_end poison gate slots of_queue expiry
-- returns {messages put back or buried, messages it still holds, ids of the buried ones …};
--   {0, 0} if the lease has not expired, or was renewed since
local lease_end_ms = tonumber(redis.call('ZSCORE', consumers, consumer) or 0)
if lease_end_ms > 0 and lease_end_ms ~= tonumber(ended_ms) and (ended_ms ~= '' or lease_end_ms > now_ms) then return {0, 0} end
redis.call('ZREM', wake, '', '>' .. consumer)  -- a full server accepts writes only after a script has freed memory
redis.call('ZADD', consumers, 0, consumer)  -- it counts as dead from now on, but may wake up between two calls
local before = redis.call('HLEN', unacked)
if before > 0 or redis.call('EXISTS', slots_held) == 1 then  -- for the consumer to find if it wakes up
  local note_ms = redis.call('PTTL', of_queue('expires'))
  redis.call('SET', of_queue('reclaimed:' .. consumer), 1, 'PX', note_ms > 0 and note_ms or 86400000)
end
local left = give_back_some(limit, 1, 'reclaimed', is_poison)
left = left + free_some(limit, {})
if left > 0 then return {before - redis.call('HLEN', unacked), left, unpack(buried)} end
if (redis.call('GET', armed) or ''):match(' (.-)%*?$') == consumer then redis.call('DEL', armed) end
redis.call('ZREM', consumers, consumer)
announce_all()
expire_as_noted()
return {before, 0, unpack(buried)}
