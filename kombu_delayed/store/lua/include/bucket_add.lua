-- bucket_add: fields on their way into hashes that are spread over buckets, one of which is split now and then. After
-- buckets.
-- needs: bucket_bytes
local BUCKET_FIELDS = 2        -- so many are not split, however large
local BUCKETS_AT_ONCE = 4      -- a bucket of so many times the size is not split, but moved bit by bit
local MOVED_AT_ONCE = 100
local bucket_adds = 0

local function set_bucket_count(key, number, cursor)
  redis.call('SET', key .. ':buckets', string.format('%.0f', number) .. (cursor and ' ' .. cursor or ''), 'KEEPTTL')
  bucket_counts[key] = nil
  read_bucket_count(key)
end

local function move_fields(source, target, entries)
  local fields = {}
  for i = 1, #entries, 2 do fields[#fields + 1] = entries[i] end
  for i = 1, #entries, 1000 do redis.call('HSET', target, unpack(entries, i, math.min(i + 999, #entries))) end
  local expires_ms = redis.call('PTTL', source)
  if expires_ms > 0 and redis.call('PTTL', target) < expires_ms then redis.call('PEXPIRE', target, expires_ms) end
  for i = 1, #fields, 1000 do redis.call('HDEL', source, unpack(fields, i, math.min(i + 999, #fields))) end
end

-- Moves some of what is in bucket 0 and belongs to others.
local function clear_bucket_0(key)
  local count = bucket_counts[key]
  local page = redis.call('HSCAN', key, count.cursor, 'COUNT', MOVED_AT_ONCE)
  for i = 1, #page[2], 2 do
    local number = bucket_number(count, page[2][i])
    if number > 0 then move_fields(key, bucket_name(key, number), {page[2][i], page[2][i + 1]}) end
  end
  set_bucket_count(key, count.number, page[1] ~= '0' and page[1] or nil)
end

-- A worker of version 0.1.0, whose name does not end with the length of its lease, would not find what it promotes.
local function all_know_buckets(key)
  for _, name in ipairs(redis.call('ZRANGE', key:match('^.*}:') .. 'consumers', 0, -1)) do
    if not name:find('%-%d+$') then return false end
  end
  return true
end

local function mean_bytes(bucket)
  local sample, bytes = redis.call('HRANDFIELD', bucket, 20, 'WITHVALUES'), 0
  for _, text in ipairs(sample) do bytes = bytes + #text end
  return bytes / (#sample / 2)
end

-- Splits the bucket whose turn it is, if fields of so many bytes make it too large.
local function grow(key, bytes)
  local count = bucket_counts[key]
  if count.cursor then return clear_bucket_0(key) end
  local next = count.number - count.power
  local bucket = bucket_name(key, next)
  local fields = redis.call('HLEN', bucket)
  if fields <= BUCKET_FIELDS or fields * bytes <= bucket_bytes or not all_know_buckets(key) then return end
  if fields > 1000 and count.number == 1 then
    local wanted = fields * mean_bytes(bucket) / bucket_bytes
    if wanted > BUCKETS_AT_ONCE then return set_bucket_count(key, 2 ^ math.ceil(math.log(wanted) / math.log(2)), '0') end
  end
  local entries, leaving = redis.call('HGETALL', bucket), {}
  for i = 1, #entries, 2 do
    local hash = tonumber(redis.sha1hex(entries[i]):sub(1, 8), 16)
    if hash % (count.power * 2) == count.number then
      leaving[#leaving + 1], leaving[#leaving + 2] = entries[i], entries[i + 1]
    end
  end
  if #leaving > 0 then move_fields(bucket, bucket_name(key, count.number), leaving) end
  set_bucket_count(key, count.number + 1)
end

-- Returns whether the field was new; if not, it stays as it is.
local function bucket_add(key, field, value)
  local bucket = bucket_of(key, field)
  if bucket_counts[key].cursor and bucket ~= key and redis.call('HEXISTS', key, field) == 1 then return false end
  if redis.call('HSETNX', bucket, field, value) == 0 then return false end
  if bucket_bytes > 0 and bucket_adds % 64 == 0 then grow(key, #field + #value) end
  bucket_adds = bucket_adds + 1
  return true
end
