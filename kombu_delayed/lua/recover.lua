-- recover: messages that were delivered to a consumer whose connection broke before it saw them.
-- Twice is safe: it only reads.
local unacked  = KEYS[1]            -- HASH tag -> priority step + message, of this consumer
local seen_tag = tonumber(ARGV[1])  -- the last one that did arrive
-- returns {tag, step + message, …}, tags ascending
local tags = {}
for _, tag in ipairs(redis.call('HKEYS', unacked)) do
  if tonumber(tag) > seen_tag then tags[#tags + 1] = tag end
end
table.sort(tags, function(a, b) return tonumber(a) < tonumber(b) end)
local answer = {}
for i, tag in ipairs(tags) do
  answer[2 * i - 1], answer[2 * i] = tag, redis.call('HGET', unacked, tag)
end
return answer
