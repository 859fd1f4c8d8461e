-- auto_delete: a queue that deletes itself keeps no lease of its only consumer, once that was killed. Where it holds
-- something the lease has to stay, for those who reclaim it; also of a consumer that does not know of the former.
-- needs: nothing
local function last_while_used(consumers, holds_some, lease_ms)
  local can_go = not holds_some and redis.call('ZCARD', consumers) == 1
  local start = consumers:sub(1, -#'consumers' - 1)
  for _, key in ipairs({consumers, start .. 'granted-by'}) do
    if can_go then redis.call('PEXPIRE', key, 10 * lease_ms) else redis.call('PERSIST', key) end
  end
end
