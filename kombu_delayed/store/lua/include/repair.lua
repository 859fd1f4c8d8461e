-- repair: a page of a scan, of which each other entry is a name, is looked through and put right.
-- needs: fixes
-- Returns {the next cursor, names looked at, 0, name, fault, …}.
local function looked_through(page, fault_of, put_right)
  local answer = {page[1], #page[2] / 2, 0}
  for i = 1, #page[2], 2 do
    local name = page[2][i]
    local fault = fault_of(name)
    if fault then
      if fixes == '1' then put_right(name) end
      answer[#answer + 1], answer[#answer + 2] = name, fault
    end
  end
  return answer
end
