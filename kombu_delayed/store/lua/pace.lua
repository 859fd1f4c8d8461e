-- pace: record rows that a job has written, at a rate that all its writers share.
-- Safe to repeat, but counts the rows twice.
-- keys: pace
-- arguments: now rows:number per_second:number
--   pace: STRING when all noted rows may have been written, in ms since the epoch
-- include: clock
-- returns how many ms the writer must wait before it writes more; O(1)
local until_ms = tonumber(redis.call('GET', pace)) or now_ms
-- A writer does not wait for rows written long ago, or because the clock was set back.
if until_ms < now_ms or until_ms > now_ms + 600000 then until_ms = now_ms end
until_ms = until_ms + rows * 1000 / per_second
local wait_ms = math.ceil(until_ms - now_ms)
redis.call('DEL', pace)  -- a full server accepts writes only after a script has freed memory
redis.call('SET', pace, string.format('%.3f', until_ms), 'PX', wait_ms + 60000)
return wait_ms
