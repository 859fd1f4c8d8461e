-- vacate: give a place at an HTTP host back, and count the consecutive callbacks that timed out.
-- Idempotent: only the holder of a place counts.
-- keys: places own timeouts
-- arguments: holder timed_out:number kept_ms:number
--   timed_out: 1 if its callback timed out; kept_ms: how long that is remembered
-- returns 1, or 0 if the holder had no place; O(log n)
redis.call('ZREM', own, holder)
if redis.call('ZREM', places, holder) == 0 then return 0 end
if timed_out == 0 then
  redis.call('DEL', timeouts)
else
  redis.call('INCR', timeouts)
  redis.call('PEXPIRE', timeouts, kept_ms)
end
return 1
