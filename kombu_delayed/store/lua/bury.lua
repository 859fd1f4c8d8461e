-- bury: move messages that a consumer holds to the dead letters, with the reason.
-- Idempotent for held messages: others do not move.
-- keys: unacked dead dead_messages dead_reasons unique_held unique_until events absent
-- arguments: now bucket_bytes:number consumer dead_limit:number dead_age_ms:number event_limit:number failures entries...
--   failures: JSON: the failed attempts (or empty)
--   entries: tag, id, reason, record (empty: the held one); …
-- include: clock buckets bucket_add dead events unique_end
-- returns the ids of the dead letters; O(log n) a message
redis.call('HDEL', unacked, '')          -- a full server accepts writes only after a script has freed memory
local buried = {}
for i = 1, #entries, 4 do
  local tag, id, reason, record = entries[i], entries[i + 1], entries[i + 2], entries[i + 3]
  if record == '' then record = redis.call('HGET', unacked, tag) end
  if record then
    local deliveries = deliveries_of(record) + 1
    buried[#buried + 1] = entomb(id, record, consumer, deliveries, reason, failures ~= '' and failures or nil)
    tell_of_held('buried', record, consumer, deliveries, id, reason)
    end_unique(record)
    redis.call('HDEL', unacked, tag)
  end
end
return buried
