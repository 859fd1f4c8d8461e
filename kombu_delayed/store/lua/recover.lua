-- recover: read messages that were delivered to a consumer whose connection broke before it saw them.
-- Read-only.
-- keys: unacked
-- arguments: seen_tag:number cursor count:number
--   seen_tag: the last tag that did arrive
--   count: about how many tags a call reads
-- returns {the next cursor, '0' at the end, tag, step + message, …} in no order; a tag may come again
local page = redis.call('HSCAN', unacked, cursor, 'COUNT', count)
local answer = {page[1]}
for i = 1, #page[2], 2 do
  if tonumber(page[2][i]) > seen_tag then
    answer[#answer + 1], answer[#answer + 2] = page[2][i], page[2][i + 1]
  end
end
return answer
