-- forget_request: let an id be taken again whose task has gone, unless this very request has made that task.
-- Twice is safe.
-- keys: job
-- arguments: run
--   job: the ledger of the id; run: its field for the request
-- returns 1 where this request has made the task, or has changed it to be so; 0: the id can be taken; O(1)
if tonumber(redis.call('HGET', job, run) or 0) > 0 then return 1 end
redis.call('DEL', job)
return 0
