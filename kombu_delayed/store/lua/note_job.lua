-- note_job: note that a job begins, how far it has come, or how it has ended.
-- Twice is safe, and counts the rows twice.
-- keys: state
-- arguments: now begins run rows:number kept_seconds:number fields...
--   state: HASH of texts: what the job is; rows; begun_ms and heard_ms, by this server's clock; kept_seconds after that
--   begins: 1: what an earlier run has left is forgotten
--   run: the one whose task tells how far it is; it says nothing new if this run has ended, or all have: ended is empty
--   fields: name, text; …
-- include: clock
-- returns nothing; O(fields)
redis.call('HDEL', state, '')  -- a full server lets a script write that has freed memory first
local now_text = string.format('%.0f', now_ms)
if begins == '1' then redis.call('DEL', state) end
redis.call('HSETNX', state, 'begun_ms', now_text)  -- a server that has lost its data hears of it later
local ended = run ~= '' and redis.call('HGET', state, 'ended')
if ended == run or ended == '' then
  fields = {}
elseif ended then  -- another run has, under the same name
  redis.call('HDEL', state, 'ended', 'accepted', 'already', 'refused')
end
if #fields > 0 then redis.call('HSET', state, unpack(fields)) end
redis.call('HINCRBY', state, 'rows', rows)
redis.call('HSET', state, 'heard_ms', now_text, 'kept_seconds', kept_seconds)
redis.call('EXPIRE', state, kept_seconds)
