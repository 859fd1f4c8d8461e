-- tally: count what a worker has done with tasks, by slots of time.
-- Idempotent: the number of a worker's last call is remembered for a day.
-- keys: outcomes absent
-- arguments: worker number:number levels entries...
--   number: of the call; a later call of the worker has a larger one
--   levels: seconds of a slot and of the slots in one hash, as in '60:3600 900:86400'
--   entries: for each minute and task: when the minute began in s since the epoch, the task's name, counts to add
-- returns 1, or 0 if this call was counted before; O(entries)
local MOST = 4000  -- fields of a hash: tasks beyond that are counted together, without a name
local told = outcomes .. 'tallied:' .. worker
if tonumber(redis.call('GET', told) or 0) >= number then return 0 end
redis.call('SET', told, number, 'PX', 86400000)

local function sum(before, added)
  local numbers, rest = {}, before:gmatch('%d+')
  for count in added:gmatch('%d+') do
    numbers[#numbers + 1] = ('%d'):format(count + (rest() or 0))
  end
  for count in rest do numbers[#numbers + 1] = count end
  return table.concat(numbers, ' ')
end

for i = 1, #entries, 3 do
  local at, task, added = tonumber(entries[i]), entries[i + 1], entries[i + 2]
  for slot, span in levels:gmatch('(%d+):(%d+)') do
    local key = outcomes .. 'rates:' .. slot .. ':' .. ('%d'):format(at / span - at / span % 1)
    local place = ('%d:'):format(at % span / slot - at % span / slot % 1)
    local field = place .. task
    local before = redis.call('HGET', key, field)
    if not before and redis.call('HLEN', key) >= MOST then
      field = place
      before = redis.call('HGET', key, field)
    end
    redis.call('HSET', key, field, sum(before or '', added))
    redis.call('PEXPIRE', key, 2 * span * 1000)
  end
end
return 1
