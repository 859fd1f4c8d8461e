-- ready_place: messages of a ready list by their places, as they were read.
-- needs: list start limit

-- The places of some texts that are at most `limit` behind `start`: what came since has moved them on.
local function places_of(texts)
  local numbers, places = {}, {}
  for n, text in ipairs(texts) do numbers[text] = n end
  for i, text in ipairs(redis.call('LRANGE', list, start, start + limit - 1)) do
    local n = numbers[text]
    if n then numbers[text], places[n] = nil, start + i - 1 end
  end
  return places
end

-- A mark that is no message is looked for from the nearer end, in the same call: nobody else sees it.
local function take_out(places, count)
  local length = redis.call('LLEN', list)
  local first, last
  for _, at in pairs(places) do
    redis.call('LSET', list, at, '\0')
    first, last = math.min(first or at, at), math.max(last or at, at)
  end
  if first then redis.call('LREM', list, last < length - first and count or -count, '\0') end
end
