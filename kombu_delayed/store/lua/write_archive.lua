-- write_archive: become the one job that writes an archive of lifecycle events, for a while, or stop being it (ms 0).
-- Idempotent.
-- keys: writer
-- arguments: name ms:number
-- returns the name of another job that writes it, or the empty string; O(1)
local other = redis.call('GET', writer)
if other and other ~= name then return other end
redis.call('DEL', writer)  -- a full server accepts writes only after a script has freed memory
if ms > 0 then redis.call('SET', writer, name, 'PX', ms) end
return ''
