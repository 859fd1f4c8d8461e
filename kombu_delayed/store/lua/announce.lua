-- announce: a consumer passes on what it has been told of: put wake tokens for all that can be claimed,
-- and let another one promise to come at the next due time.
-- Twice is safe.
-- keys: partitions delayed messages duplicates wake armed gate ready...
-- arguments: steps
-- include: waiting ready backlog announce expiry
-- returns 1
redis.call('DEL', armed)  -- also lets a full server accept the rest
announce_all()
expire_as_noted()
return 1
