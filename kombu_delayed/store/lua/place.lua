-- place: take a place at an HTTP host for one callback, if the host and the worker have one left.
-- Twice is safe: a holder has one place.
-- keys: places own timeouts
-- arguments: now holder limit:number own_limit:number tolerated:number kept_ms:number quick_ms:number
--   places: ZSET holder -> when its place is free again; own: those of one worker
--   timeouts: number of callbacks in a row that timed out; from `tolerated` on, one place is left
--   quick_ms: a host is quick while none of its callbacks has lasted longer
-- include: clock
-- returns 1, or where all are taken: 2 at a quick host, -1 at one that times out, else 0; O(log n)
local times_out = tonumber(redis.call('GET', timeouts) or 0) >= tolerated
if times_out then limit = 1 end
for key, most in pairs({[places] = limit, [own] = own_limit}) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now_ms)
  if not redis.call('ZSCORE', key, holder) and redis.call('ZCARD', key) >= most then
    if times_out then return -1 end
    local oldest = redis.call('ZRANGE', places, 0, 0, 'WITHSCORES')[2]
    return oldest and now_ms + kept_ms - oldest <= quick_ms and 2 or 0
  end
end
for _, key in ipairs({places, own}) do
  redis.call('ZADD', key, now_ms + kept_ms, holder)
  redis.call('PEXPIRE', key, kept_ms)
end
return 1
