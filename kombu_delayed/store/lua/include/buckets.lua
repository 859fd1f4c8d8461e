-- buckets: hashes that grow with a queue, each spread over several keys by linear hashing, so that no key becomes too
-- large to be moved or deleted. Bucket 0 is the key itself, bucket n is `key:n`; the string `key:buckets` has their
-- number where it is more than one. What is not in its bucket is looked for in bucket 0: there are producers of version
-- 0.1.0, which know no other, and a large hash that they have left is moved bit by bit.
-- needs: nothing
local bucket_counts = {}  -- key -> number of buckets, and the greatest power of 2 in it

-- Behind the number is the cursor of a scan, as long as bucket 0 has what belongs to others.
local function read_bucket_count(key)
  local text = redis.call('GET', key .. ':buckets') or '1'
  local found = {number = tonumber(text:match('^%d+')), cursor = text:match(' (%d+)$'), power = 1}
  while found.power * 2 <= found.number do found.power = found.power * 2 end
  bucket_counts[key] = found
  return found
end

local function bucket_name(key, number)
  return number == 0 and key or key .. ':' .. string.format('%.0f', number)
end

local function bucket_number(count, field)
  local hash = tonumber(redis.sha1hex(field):sub(1, 8), 16)
  local number = hash % (count.power * 2)
  return number < count.number and number or number - count.power
end

local function bucket_of(key, field)
  local count = bucket_counts[key] or read_bucket_count(key)
  if count.number == 1 then return key end
  return bucket_name(key, bucket_number(count, field))
end

local function bucket_get(key, field)
  local bucket = bucket_of(key, field)
  local found = redis.call('HGET', bucket, field)
  if not found and bucket ~= key then return redis.call('HGET', key, field) end
  return found
end

local function bucket_has(key, field)
  local bucket = bucket_of(key, field)
  if redis.call('HEXISTS', bucket, field) == 1 then return true end
  return bucket ~= key and redis.call('HEXISTS', key, field) == 1
end

local function bucket_get_all(key, fields)
  if bucket_of(key, '') == key and bucket_counts[key].number == 1 then
    return redis.call('HMGET', key, unpack(fields))
  end
  local found = {}
  for i, field in ipairs(fields) do found[i] = bucket_get(key, field) end
  return found
end

-- Gives a field that is there another value.
local function bucket_set(key, field, value)
  local bucket = bucket_of(key, field)
  redis.call('HSET', bucket, field, value)
  if bucket ~= key then redis.call('HDEL', key, field) end
end

-- The last one that goes takes the number of the buckets along.
local function forget_buckets(key)
  for number = 0, bucket_counts[key].number - 1 do
    if redis.call('EXISTS', bucket_name(key, number)) == 1 then return end
  end
  redis.call('DEL', key .. ':buckets')
  bucket_counts[key] = nil
end

local function bucket_drop(key, field)
  local bucket = bucket_of(key, field)
  local count = redis.call('HDEL', bucket, field)
  if bucket_counts[key].number == 1 then return count end
  if bucket ~= key and count == 0 then count = redis.call('HDEL', key, field) end
  if redis.call('EXISTS', bucket) == 0 then forget_buckets(key) end
  return count
end

-- Returns how many of the fields were there.
local function bucket_drop_all(key, fields)
  local count = 0
  if bucket_of(key, '') == key and bucket_counts[key].number == 1 then
    for i = 1, #fields, 1000 do count = count + redis.call('HDEL', key, unpack(fields, i, math.min(i + 999, #fields))) end
  else
    for _, field in ipairs(fields) do count = count + bucket_drop(key, field) end
  end
  return count
end

-- With the bucket of a field expires what says how many buckets there are: not before the last of them.
local function bucket_expire(key, field, ms)
  redis.call('PEXPIRE', bucket_of(key, field), ms)
  redis.call('PEXPIRE', key .. ':buckets', ms)
end

local function bucket_persist(key)
  for number = 0, read_bucket_count(key).number - 1 do redis.call('PERSIST', bucket_name(key, number)) end
  redis.call('PERSIST', key .. ':buckets')
end

local function bucket_total(key)
  local total = 0
  for number = 0, read_bucket_count(key).number - 1 do
    total = total + redis.call('HLEN', bucket_name(key, number))
  end
  return total
end
