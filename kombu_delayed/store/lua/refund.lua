-- refund: return the tokens of a message that has left the gate and does not run, so that others can have them.
-- Not idempotent: a second call returns them twice, so the call is never repeated. If it is lost, they come back in time.
-- keys: delayed wake gate ready...
-- arguments: now steps limits due_ms:number uses...
--   limits: as in deliver_gated
--   due_ms: when the message was due: a message that was not late enough has taken no token of some limits
--   uses: limit:key, cost; …
-- include: clock waiting ready gate override limits
-- returns 1; O(log n) a limit
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory
local has_opened = false
for i = 1, #uses, 2 do
  local use = {limit = uses[i], name = uses[i]:match('^[^:]*'), cost = tonumber(uses[i + 1])}
  local limit = limit_of[use.name]
  if limit and needs_token(limit, due_ms) then
    local until_ms = spent_until(use) - math.min(use.cost, limit.burst) * limit.every_ms
    if until_ms > now_ms then spend(use, until_ms) else redis.call('DEL', gate .. 'rate:' .. use.limit) end
    has_opened = (redis.call('EXISTS', gate .. 'blocked:' .. use.limit) == 1 and unblock(use.limit)) or has_opened
  end
end
if has_opened then announce_ready() end
return 1
