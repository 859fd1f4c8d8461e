-- expiry: a queue with an expiry leaves nothing behind: its other keys expire with its ready lists. Messages that are
-- not yet due do not expire, and the leases of consumers with its messages last longer. After ready and of_queue.
-- needs: ready wake
local function last_for(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end

-- Workers of version 0.1.0 cannot extend the expiry. Their names do not end with the length of their lease.
local function leases_last_for(consumers, ms)
  for _, name in ipairs(redis.call('ZRANGE', consumers, 0, -1)) do
    if not name:find('%-%d+$') then return redis.call('PERSIST', consumers) end
  end
  last_for(consumers, ms)
end

local function expire_in(ms)
  for _, list in ipairs(ready) do redis.call('PEXPIRE', list, ms) end
  for _, name in ipairs({'wake', 'armed', 'events'}) do redis.call('PEXPIRE', of_queue(name), ms) end
  if redis.call('EXISTS', of_queue('unique')) == 0 then return end
  if redis.call('EXISTS', of_queue('partitions'), of_queue('delayed:waiting')) == 0 then  -- none is delayed
    for _, name in ipairs({'unique', 'unique-due'}) do redis.call('PEXPIRE', of_queue(name), ms) end
  end
end

-- For callers that declare the expiry. They leave a note for callers that do not, which may create a list again.
local function expire_as_declared(ms, lease_ms)
  local note = of_queue('expires')
  local kept_ms = ms + (lease_ms > 0 and 10 * lease_ms or math.max(ms, 10000))
  if redis.call('PTTL', note) < kept_ms then redis.call('SET', note, ms, 'PX', kept_ms) end
  expire_in(ms)
  return kept_ms
end

local function expire_as_noted()
  local ms = redis.call('GET', of_queue('expires'))
  if ms then expire_in(ms) end
end
