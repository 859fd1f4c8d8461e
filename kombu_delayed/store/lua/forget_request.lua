-- forget_request: make an id whose task is gone available again, unless this same request has made that task.
-- Idempotent.
-- keys: job
-- arguments: run
--   job: the ledger of the id; run: its field for the request
-- returns 1 if this request has made the task, or changed it accordingly; 0 if the id is available; O(1)
if tonumber(redis.call('HGET', job, run) or 0) > 0 then return 1 end
redis.call('DEL', job)
return 0
