-- free: release the slots of messages whose tasks have ended or did not start.
-- Idempotent: a message without slots frees none.
-- keys: delayed wake gate ready...
-- arguments: consumer steps tags...
-- include: waiting ready gate slots
-- returns 1; O(log n) a message
free(tags)
return 1
