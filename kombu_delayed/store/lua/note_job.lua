-- note_job: record that a job begins, its progress, or how it has ended.
-- Safe to repeat, but counts the rows twice.
-- keys: state
-- arguments: now begins run rows:number kept_seconds:number fields...
--   state: HASH of texts: description of the job; rows; begun_ms and heard_ms, by this server's clock; kept_seconds after that
--   begins: 1: forget the state of an earlier run
--   run: the run whose task reports; its fields are ignored if this run has ended, or all runs have: ended is empty
--   fields: name, text; …
-- include: clock
-- returns nothing; O(fields)
redis.call('HDEL', state, '')  -- a full server accepts writes only after a script has freed memory
local now_text = string.format('%.0f', now_ms)
if begins == '1' then redis.call('DEL', state) end
redis.call('HSETNX', state, 'begun_ms', now_text)  -- a server that has lost its data learns of the job later
local ended = run ~= '' and redis.call('HGET', state, 'ended')
if ended == run or ended == '' then
  fields = {}
elseif ended then  -- another run of the same name has ended
  redis.call('HDEL', state, 'ended', 'accepted', 'already', 'refused')
end
if #fields > 0 then redis.call('HSET', state, unpack(fields)) end
redis.call('HINCRBY', state, 'rows', rows)
redis.call('HSET', state, 'heard_ms', now_text, 'kept_seconds', kept_seconds)
redis.call('EXPIRE', state, kept_seconds)
