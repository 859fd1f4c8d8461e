-- audit_index: scan the partition index for entries that may contradict the messages.
-- Read-only.
-- keys: partitions delayed messages
-- arguments: name bound offset:number limit:number
--   name: the last partition that was scanned (or empty) …
--   bound: … its bound …
--   offset: … and how many of its members were scanned; -1: all of them
--   limit: how many members to scan, at most 1,000
-- include: buckets
-- returns {1 if there is more, name, bound, offset, members scanned, bytes read, partition, member, …};
--   a partition without members has an empty member; O(limit)
local function place()
  if name == '' then return 0, 0 end
  local rank = redis.call('ZRANK', partitions, name)
  if not rank then return redis.call('ZCOUNT', partitions, '-inf', bound), 0 end
  if offset < 0 then return rank + 1, 0 end
  return rank, offset
end

local function is_suspect(kept, score, next_bound)
  local due_ms = kept and tonumber(kept:match('^.(%d+)'))
  return due_ms ~= score or score < tonumber(bound) or score >= next_bound
end

local answer = {0, name, bound, offset, 0, 0}
local rank, start = place()
local looked = 0  -- an empty partition counts as one
while looked < limit do
  local pair = redis.call('ZRANGE', partitions, rank, rank + 1, 'WITHSCORES')
  if #pair == 0 then return answer end
  name, bound = pair[1], pair[2]
  local next_bound = tonumber(pair[4] or 'inf')
  local wanted = limit - looked
  local found = redis.call('ZRANGE', delayed .. name, start, start + wanted - 1, 'WITHSCORES')
  local members = {}
  for i = 1, #found, 2 do members[#members + 1] = found[i] end
  if #members > 0 then
    for i, kept in ipairs(bucket_get_all(messages, members)) do
      answer[6] = answer[6] + #(kept or '')
      if is_suspect(kept, tonumber(found[2 * i]), next_bound) then
        answer[#answer + 1], answer[#answer + 2] = name, members[i]
      end
    end
  elseif start == 0 then
    answer[#answer + 1], answer[#answer + 2] = name, ''
  end
  answer[5] = answer[5] + #members
  looked = looked + math.max(#members, 1)
  start = start + #members
  answer[2], answer[3], answer[4] = name, bound, #members < wanted and -1 or start
  if #members < wanted then rank, start = rank + 1, 0 end
end
answer[1] = 1
return answer
