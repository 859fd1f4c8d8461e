-- urgent: a sorted set beside the tree, with the messages that are more urgent than others. It is a hint: the tree has
-- all messages. A worker of version 0.1.0 does not know this set, so an entry may be stale or missing. After backlog,
-- in a branch where a message has another step than `least`.
-- needs: partitions
local STEP = 2 ^ 48      -- a score is a priority step times this, plus the due time in ms
local LEAST = 31 * STEP  -- the score of the member '\31' is this plus the least urgent step since the backlog was empty

-- `step` is the character code in front of a record.
local function hint(member, step, due_ms)
  step = step - 48
  least = least or (redis.call('ZSCORE', partitions .. ':urgent', '\31') or LEAST) - LEAST
  if step > least and step < 31 then
    redis.call('ZADD', partitions .. ':urgent', LEAST + step, '\31')
    least = step
  elseif step < least and due_ms < STEP then
    redis.call('ZADD', partitions .. ':urgent', step * STEP + due_ms, member)
  end
end
