-- keep_report: keep the report of a job's last run for a while, even on a full server.
-- Idempotent.
-- keys: report
-- arguments: text seconds:number
-- returns nothing; O(1)
redis.call('DEL', report)  -- a full server accepts writes only after a script has freed memory
redis.call('SET', report, text, 'EX', seconds)
