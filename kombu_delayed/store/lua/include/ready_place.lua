-- ready_place: find messages of a ready list near the places where they were read.
-- needs: list start limit window

-- The places of some texts: where they were read, or near there, because other messages came or went since. The amount
-- read is bounded: the server takes some ten milliseconds for a megabyte.
local function places_of(texts)
  local numbers, places, left, bytes = {}, {}, 0, 0
  for n, text in ipairs(texts) do
    if not numbers[text] then left = left + 1 end
    numbers[text] = n
  end

  local function look(first, last)
    for at = math.max(first, 0), last, 10 do
      if left == 0 then return end
      for i, text in ipairs(redis.call('LRANGE', list, at, math.min(at + 9, last))) do
        local n = numbers[text]
        bytes = bytes + #text
        if n then numbers[text], places[n], left = nil, at + i - 1, left - 1 end
      end
    end
  end

  look(start, start + limit - 1)
  bytes = 0
  for away = 0, window - 1, 10 do
    if bytes >= 2 ^ 20 then break end
    local far = math.min(away + 10, window)
    look(start + limit + away, start + limit + far - 1)
    look(start - far, start - away - 1)
  end
  return places
end

-- Overwrites the messages with a mark and removes the marks from the nearer end. No other client sees a mark, because
-- both happen in this call.
local function take_out(places, count)
  local length = redis.call('LLEN', list)
  local first, last
  for _, at in pairs(places) do
    redis.call('LSET', list, at, '\0')
    first, last = math.min(first or at, at), math.max(last or at, at)
  end
  if first then redis.call('LREM', list, last < length - first and count or -count, '\0') end
end
