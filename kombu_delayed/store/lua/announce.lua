-- announce: a consumer passes its wake tokens on: put wake tokens for everything that can be claimed, and let another
-- consumer promise to claim at the next due time.
-- Idempotent.
-- keys: partitions delayed messages wake armed gate ready...
-- arguments: steps
-- include: waiting ready earliest announce of_queue expiry
-- returns 1
redis.call('DEL', armed)  -- also lets a full server accept the rest
announce_all()
expire_as_noted()
return 1
