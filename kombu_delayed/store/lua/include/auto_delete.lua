-- auto_delete: in a queue that deletes itself, the lease of its only consumer expires if that consumer is killed. A
-- consumer that holds messages keeps its lease, so that others can reclaim them. So does a consumer that joins without
-- knowing that the queue deletes itself.
-- needs: nothing
local function last_while_used(consumers, holds_some, lease_ms)
  local can_go = not holds_some and redis.call('ZCARD', consumers) == 1
  local start = consumers:sub(1, -#'consumers' - 1)
  for _, key in ipairs({consumers, start .. 'granted-by'}) do
    if can_go then redis.call('PEXPIRE', key, 10 * lease_ms) else redis.call('PERSIST', key) end
  end
end
