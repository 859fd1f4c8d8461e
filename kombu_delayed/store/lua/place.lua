-- place: take a place at an HTTP host for one callback, if the host and the worker have one left.
-- Idempotent: a holder has one place.
-- keys: places own timeouts
-- arguments: now holder limit:number own_limit:number tolerated:number kept_ms:number
--   places: ZSET holder -> when its place expires; own: those of one worker
--   timeouts: number of consecutive callbacks that timed out; from `tolerated` on, the host has only one place
-- include: clock
-- returns 1; or if all places are taken 0, or -1 at a host that times out, and for how many ms the oldest callback of
--   the host has lasted; O(log n)
local times_out = tonumber(redis.call('GET', timeouts) or 0) >= tolerated
if times_out then limit = 1 end
for key, most in pairs({[places] = limit, [own] = own_limit}) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now_ms)
  if not redis.call('ZSCORE', key, holder) and redis.call('ZCARD', key) >= most then
    local oldest = redis.call('ZRANGE', places, 0, 0, 'WITHSCORES')[2]
    return {times_out and -1 or 0, oldest and now_ms + kept_ms - oldest or 0}
  end
end
for _, key in ipairs({places, own}) do
  redis.call('ZADD', key, now_ms + kept_ms, holder)
  redis.call('PEXPIRE', key, kept_ms)
end
return {1, 0}
