-- withdraw: drop messages of one ready list.
-- Idempotent: messages that are no longer ready do not move.
-- keys: list wake unique_held unique_until events
-- arguments: event_limit:number start:number limit:number window:number messages...
--   start, limit: where they were read
--   window: how far they are searched on both sides of that
-- include: events ready_place unique_end
-- returns as text 1 for each that was dropped, 0 for others; O(limit + window), and one comparison for each message
--   between them and the nearer end of the list
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local places, counts, count = places_of(messages), {}, 0
for n, message in ipairs(messages) do
  counts[n] = places[n] and '1' or '0'
  if places[n] then
    count = count + 1
    tell_of_held('cancelled', message)
    end_unique(message)
  end
end
take_out(places, count)
return table.concat(counts, ' ')
