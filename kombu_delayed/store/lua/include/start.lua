-- start: where a page begins in a sorted set of times, after the last member of the page before.
-- needs: from_ms after

-- Members with the same time are in the order of their bytes. Lua's own comparison would use the locale.
local function is_greater(member, other)
  for i = 1, math.min(#member, #other) do
    if member:byte(i) ~= other:byte(i) then return member:byte(i) > other:byte(i) end
  end
  return #member > #other
end

-- The last member may be gone since, or have another time, so its place is found by binary search.
local function start_in(key)
  local low = redis.call('ZCOUNT', key, '-inf', '(' .. from_ms)
  if after == '' then return low end
  local high = redis.call('ZCOUNT', key, '-inf', from_ms)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_greater(redis.call('ZRANGE', key, middle, middle)[1], after:sub(2)) then high = middle else low = middle + 1 end
  end
  return low
end
