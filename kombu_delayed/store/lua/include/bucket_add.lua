-- bucket_add: add fields to hashes that are spread over buckets. After buckets.
-- needs: bucket_bytes
local BUCKET_FIELDS = 2  -- a bucket with this many fields is never full, however large they are
local unchecked = {}     -- key -> bytes added since one of its buckets was checked; the first addition of a call checks

-- A worker of version 0.1.0 would not find the messages in buckets. Its name does not end with the length of its lease,
-- and that of a program that got messages over its HTTP server has no zeros.
local function all_know_buckets(key)
  for _, name in ipairs(redis.call('ZRANGE', key:match('^.*}:') .. 'consumers', 0, -1)) do
    if not (name:find('%-%d+$') or name:find('^http:%d+:00000000')) then return false end
  end
  return true
end

local function mean_bytes(bucket)
  local sample, bytes = redis.call('HRANDFIELD', bucket, 20, 'WITHVALUES'), 0
  for _, text in ipairs(sample) do bytes = bytes + #text end
  return bytes / (#sample / 2)
end

-- Whether a bucket of the last generation is full, after adding a field of this many bytes.
local function is_full(bucket, bytes)
  local count = redis.call('HLEN', bucket)
  return count > BUCKET_FIELDS and count * bytes > bucket_bytes and count * mean_bytes(bucket) > bucket_bytes
end

-- Returns whether the field was new; an existing field does not change.
local function bucket_add(key, field, value)
  local layout = layouts[key] or layout_of(key)
  local hash = layout.last > 0 and hash_of(field) or 0
  for generation = layout.first, layout.last - 1 do
    if redis.call('HEXISTS', bucket_name(key, generation, hash), field) == 1 then return false end
  end
  local bucket = bucket_name(key, layout.last, hash)
  value = layout.last > 0 and packed(field, value) or unpacked(field, value)
  if redis.call('HSETNX', bucket, field, value) == 0 then return false end
  unchecked[key] = (unchecked[key] or bucket_bytes) + #field + #value
  if bucket_bytes > 0 and unchecked[key] * 8 >= bucket_bytes then
    unchecked[key] = 0
    if is_full(bucket, #field + #value) and all_know_buckets(key) then
      local expires_ms = redis.call('PTTL', bucket)
      set_layout(key, layout.first, layout.last + 1)
      if expires_ms > 0 then redis.call('PEXPIRE', key .. ':buckets', expires_ms) end
    end
  end
  return true
end
