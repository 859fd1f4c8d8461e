-- admit: give tickets to messages that a consumer holds and let them wait at the gate, without any slots they had.
-- Idempotent: messages that are no longer held do not move.
-- keys: partitions delayed messages duplicates wake unacked events gate ready...
-- arguments: now bucket_bytes:number consumer steps event_limit:number limits entries...
--   limits: as in deliver_gated
--   entries: tag, ticket, record (empty: the held one); …
-- include: clock waiting ready buckets bucket_add backlog events gate override limits arrive slots waits
-- returns how many; O(log n) a message
redis.call('HDEL', unacked, '')        -- a full server accepts writes only after a script has freed memory
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
let_arrive_in_time()
if #tags > 0 then
  redis.call('HDEL', unacked, unpack(tags))
  free(tags)
end
tell_of_arrivals()
if redis.call('EXISTS', gate .. 'turns') == 1 then announce_ready() end
return #tags
