-- bucket_add: fields on their way into hashes that are spread over buckets. After buckets.
-- needs: bucket_bytes
local BUCKET_FIELDS = 2  -- so many are not too many, however large
local unchecked = {}     -- key -> bytes since a bucket of it was looked at; the first one of a call looks

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

-- One of the last generation, which has just been given a field of so many bytes.
local function is_full(bucket, bytes)
  local count = redis.call('HLEN', bucket)
  return count > BUCKET_FIELDS and count * bytes > bucket_bytes and count * mean_bytes(bucket) > bucket_bytes
end

-- Returns whether the field was new; if not, it stays as it is.
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
