-- repair: check a page of a set or a hash, and repair it. After buckets.
-- needs: cursor count fixes
-- Returns {the next cursor, names checked, bytes read, name, fault, …}.
local function looked_through(command, key, fault_of, put_right)
  local page = command == 'HSCAN' and bucket_scan(key, cursor, count) or redis.call(command, key, cursor, 'COUNT', count)
  local answer = {page[1], #page[2] / 2, 0}
  for i = 1, #page[2], 2 do
    local name = page[2][i]
    answer[3] = answer[3] + #page[2][i + 1]
    local fault = fault_of(name)
    if fault then
      if fixes == '1' then put_right(name, fault) end
      answer[#answer + 1], answer[#answer + 2] = name, fault
    end
  end
  return answer
end
