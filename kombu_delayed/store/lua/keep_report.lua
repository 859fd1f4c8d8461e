-- keep_report: keep the report of a job's last run for a while, also on a server that is full.
-- Twice is safe.
-- keys: report
-- arguments: text seconds:number
-- returns nothing; O(1)
redis.call('DEL', report)  -- a full server lets a script write that has freed memory first
redis.call('SET', report, text, 'EX', seconds)
