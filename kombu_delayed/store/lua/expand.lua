-- expand: write ready messages as they were before they were compressed.
-- Twice is safe: by then they are not what they were read as.
-- keys: list
-- arguments: start:number limit:number window:number texts...
--   start, limit: where they were read; they are looked for so far on both sides of that, too: window
--   texts: a message as it was read, and as it was; …
-- include: ready_place
-- returns how many; O(limit + window)
local read, count = {}, 0
for i = 1, #texts, 2 do read[#read + 1] = texts[i] end
for n, at in pairs(places_of(read)) do
  redis.call('LSET', list, at, texts[2 * n])
  count = count + 1
end
return count
