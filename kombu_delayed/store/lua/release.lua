-- release: put messages that a consumer holds back to their ready lists: to the tails, in the order given, or to the
-- heads, in the order in which they were delivered.
-- Idempotent: messages that are no longer held do not move.
-- keys: wake unacked held dead dead_messages dead_reasons unique_held unique_until events absent ready...
-- arguments: now bucket_bytes:number consumer steps counted:number behind max_deliveries:number dead_limit:number dead_age_ms:number
-- arguments: event_limit:number tags...
--   counted: 1: this was an attempt, 0: it never started
--   behind: 1: to the tails, 0: to the heads
--   max_deliveries: 0: any number
-- include: clock waiting ready buckets bucket_add events unacked dead unique_end poison of_queue expiry
-- returns {how many, how many tags it has looked at before it stopped after a megabyte, ids of the buried ones …}; O(log n) a message
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local buries = counted > 0 and is_poison
if behind ~= '1' then highest_first(tags) end
local returned, looked_at = put_back(behind == '1' and 'LPUSH' or 'RPUSH', tags, counted, 'released', buries)
expire_as_noted()
return {returned, looked_at, unpack(buried)}
