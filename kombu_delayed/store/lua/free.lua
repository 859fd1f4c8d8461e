-- free: release the slots of messages whose tasks have ended or did not start.
-- Idempotent: a message without slots frees none.
-- keys: delayed wake gate ready...
-- arguments: consumer steps tags...
-- include: waiting ready gate slots
-- returns 1; O(log n) a message
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
free(tags)
return 1
