-- pace: note rows that a job has written, at a rate that all of its writers keep together.
-- Twice is safe, and counts the rows twice.
-- keys: pace
-- arguments: now rows:number per_second:number
--   pace: STRING when all noted rows may have been written, in ms since the epoch
-- include: clock
-- returns for how many ms the writer waits before it writes more; O(1)
local until_ms = tonumber(redis.call('GET', pace)) or now_ms
-- Nobody waits for what was written long ago, nor because the clock was set back.
if until_ms < now_ms or until_ms > now_ms + 600000 then until_ms = now_ms end
until_ms = until_ms + rows * 1000 / per_second
local wait_ms = math.ceil(until_ms - now_ms)
redis.call('SET', pace, string.format('%.3f', until_ms), 'PX', wait_ms + 60000)
return wait_ms
