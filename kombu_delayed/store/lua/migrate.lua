-- migrate: move messages between the keys of the stock Redis transport and the backlog.
-- Idempotent: messages that have left their source do not move.
-- keys: partitions delayed messages duplicates wake stock_unacked stock_index ready...
-- arguments: now partition_size:number bucket_bytes:number steps source until_seconds:number keep start:number stop:number entries...
--   stock_unacked: HASH tag -> JSON [message, exchange, routing key]
--   stock_index: ZSET tag -> when it was delivered, in s
--   source: unacked (of the stock transport), ready or delayed
--   until_seconds: for unacked: take messages that were delivered until then
--   keep: for unacked: 1: leave the message there, because another queue gets it too
--   start: for ready: the part of the list to search, from its left end
--   entries: tag (or member of the backlog), id, due_ms, step + message (of the backlog: step + due time + original text, if
--     it is compressed); …
-- include: clock waiting ready buckets bucket_add earliest backlog of_queue expiry
-- returns {messages that are delayed now, messages that are ready now}
local PLACEHOLDER = '\0moved'
local before = earliest()
local first
local counts = {0, 0}
redis.call('ZREM', wake, '')  -- a full server accepts writes only after a script has freed memory

local function delay(id, due_ms, record)
  put(id, due_ms, record, partition_size)
  if not first or due_ms < first then first = due_ms end
  counts[1] = counts[1] + 1
end

local function make_ready(push, step, message)
  redis.call(push, list_for(step), message)
  counts[2] = counts[2] + 1
end

local function from_unacked(tag, id, due_ms, record)
  local since = tonumber(redis.call('ZSCORE', stock_index, tag) or 0)
  if since > until_seconds or redis.call('HEXISTS', stock_unacked, tag) == 0 then return end
  if due_ms > now_ms then
    delay(id, due_ms, record)
  else
    make_ready('RPUSH', record:sub(1, 1), record:sub(2))
  end
  if keep == '1' then return end
  redis.call('ZREM', stock_index, tag)
  redis.call('HDEL', stock_unacked, tag)
end

local function is_there(member, due_ms)
  local name = redis.call('ZREVRANGEBYSCORE', partitions, due_ms, '-inf', 'LIMIT', 0, 1)[1]
  local found = name and redis.call('ZSCORE', delayed .. name, member)
  return tonumber(found or redis.call('ZSCORE', delayed .. 'waiting', member) or -1) == due_ms
end

local function from_delayed(member, _, due_ms, readable)
  if not is_there(member, due_ms) then return end
  local kept = bucket_get(messages, member)
  local step, _, message = parts_of(kept:find(ZSTD, 1, true) and readable ~= '' and readable or kept)
  if due_ms <= now_ms then message = string.format('{"due_ms":%.0f,', due_ms) .. message:sub(2) end
  make_ready('LPUSH', step, message)
  unindex(member, due_ms)
  bucket_drop(messages, member)
  -- include: forget_duplicate
  forget_duplicate(member)
end

-- Elements may have moved since the caller read them, so they are found by their text. Each is overwritten in its place,
-- and then all are removed in one pass.
local function from_ready()
  local wanted, places, step = {}, {}, entries[4]:sub(1, 1)
  for i = 1, #entries, 4 do wanted[entries[i + 3]] = i end
  local list = list_for(step)
  for offset, message in ipairs(redis.call('LRANGE', list, start, stop)) do
    local i = wanted[step .. message]
    if i and tonumber(entries[i + 2]) > now_ms then
      delay(entries[i + 1], tonumber(entries[i + 2]), step .. message)
      places[#places + 1] = start + offset - 1
    end
  end
  if #places == 0 then return end
  for _, place in ipairs(places) do redis.call('LSET', list, place, PLACEHOLDER) end
  local near_left = start * 2 < redis.call('LLEN', list)
  redis.call('LREM', list, near_left and #places or -#places, PLACEHOLDER)
end

if source == 'ready' then
  from_ready()
else
  local take = source == 'unacked' and from_unacked or from_delayed
  for i = 1, #entries, 4 do
    take(entries[i], entries[i + 1], tonumber(entries[i + 2]), entries[i + 3])
  end
end
if first then announce_due(first, before) end
if counts[2] > 0 then
  announce_ready()
  expire_as_noted()
end
if redis.call('EXISTS', partitions) == 0 then
  redis.call('ZREM', wake, 'due')
  redis.call('UNLINK', partitions .. ':urgent')
end
return counts
