-- pace: record rows that a job has written, at a rate that all its writers share.
-- Safe to repeat, but counts the rows twice.
-- keys: pace
-- arguments: now rows:number per_second:number
--   pace: STRING when all noted rows may have been written, and when that was noted, in ms since the epoch
-- include: clock
-- returns how many ms the writer must wait before it writes more; O(1)
local until_ms, noted_ms = (redis.call('GET', pace) or ''):match('^(%S+) ?(%S*)$')
until_ms, noted_ms = tonumber(until_ms) or now_ms, tonumber(noted_ms) or now_ms
-- A writer does not wait for rows written long ago, or because the clock was set back.
if until_ms < now_ms or noted_ms > now_ms + 1000 then until_ms = now_ms end
until_ms = until_ms + rows * 1000 / per_second
local wait_ms = math.ceil(until_ms - now_ms)
redis.call('DEL', pace)  -- a full server accepts writes only after a script has freed memory
redis.call('SET', pace, string.format('%.3f %.0f', until_ms, now_ms), 'PX', wait_ms + 60000)
return wait_ms
