-- expand: replace compressed ready messages by their original text.
-- Idempotent: after the first call they differ from the texts that were read.
-- keys: list
-- arguments: start:number limit:number window:number texts...
--   start, limit: where they were read
--   window: how far they are searched on both sides of that
--   texts: a message as it was read, and its original text; …
-- include: ready_place
-- returns how many; O(limit + window)
local read, count = {}, 0
for i = 1, #texts, 2 do read[#read + 1] = texts[i] end
for n, at in pairs(places_of(read)) do
  redis.call('LSET', list, at, texts[2 * n])
  count = count + 1
end
return count
