-- buckets: hashes that grow with a queue, each spread over several keys, so that no key becomes too large to be moved
-- or deleted. Generation 0 is the key itself. Most queues have only that, and version 0.1.0 knows only that.
-- Generation g has 8^g buckets, `key:8^g` and up, by a hash of the field. When a bucket of the last generation is full,
-- new fields go to a new generation. Existing fields are never moved: they stay until they are dropped. `key:buckets`
-- is the string "first last", the generations with fields; without that key it is 0 0. Records of messages are packed
-- from generation 1 on. All readers and writers of such a hash know this.
-- include: pack
-- needs: nothing
local PER_GENERATION = 8
local layouts = {}  -- key -> first and last generation
local places = {}   -- field -> where bucket_look has found it

local function layout_of(key)
  local first, last = (redis.call('GET', key .. ':buckets') or '0 0'):match('^(%d+) (%d+)$')
  local found = {first = tonumber(first), last = tonumber(last)}
  layouts[key] = found
  return found
end

local function set_layout(key, first, last)
  redis.call('SET', key .. ':buckets', first .. ' ' .. last, 'KEEPTTL')
  layouts[key] = {first = first, last = last}
end

local function hash_of(field)
  return tonumber(redis.sha1hex(field):sub(1, 8), 16)
end

local function bucket_name(key, generation, hash)
  if generation == 0 then return key end
  local size = PER_GENERATION ^ generation
  return key .. ':' .. size + hash % size
end

-- The value of a field, packed or not, or false; its bucket; and the bucket's generation.
local function bucket_find(key, field)
  local layout = layouts[key] or layout_of(key)
  if layout.last == 0 then return redis.call('HGET', key, field), key, 0 end
  local hash = hash_of(field)
  for generation = layout.last, layout.first, -1 do
    local bucket = bucket_name(key, generation, hash)
    local found = redis.call('HGET', bucket, field)
    if found then return found, bucket, generation end
  end
  return layout.first > 0 and redis.call('HGET', key, field), key, 0  -- a producer of version 0.1.0 writes there
end

-- The value of a field, packed or not, or false. Finding it again, to remove it, costs less.
local function bucket_look(key, field)
  local found, bucket, generation = bucket_find(key, field)
  if found then places[field] = {key = key, bucket = bucket, generation = generation} end
  return found
end

local function bucket_get(key, field)
  local found = bucket_look(key, field)
  return found and unpacked(field, found)
end

local function bucket_has(key, field)
  return (bucket_find(key, field)) ~= false
end

-- The values of fields, packed or not; false for missing ones. Several fields of one bucket are read in one call.
local function bucket_read_all(key, fields)
  local layout = layouts[key] or layout_of(key)
  if layout.last == 0 then return redis.call('HMGET', key, unpack(fields)) end
  local found, size, together = {}, PER_GENERATION ^ layout.last, {}  -- bucket -> its fields, and their places
  if size * 4 > #fields then
    for i, field in ipairs(fields) do found[i] = bucket_find(key, field) end
    return found
  end
  for i, field in ipairs(fields) do
    local n = hash_of(field) % size
    local each = together[n] or {fields = {}, places = {}}
    together[n] = each
    each.fields[#each.fields + 1], each.places[#each.places + 1] = field, i
  end
  for n, each in pairs(together) do
    for i, value in ipairs(redis.call('HMGET', key .. ':' .. size + n, unpack(each.fields))) do
      found[each.places[i]] = value or (bucket_find(key, each.fields[i]))
    end
  end
  return found
end

local function bucket_get_all(key, fields)
  local found = bucket_read_all(key, fields)
  if layouts[key].last == 0 then return found end
  for i, value in ipairs(found) do found[i] = value and unpacked(fields[i], value) end
  return found
end

-- Sets the value of a field.
local function bucket_set(key, field, value)
  local found, bucket, generation = bucket_find(key, field)
  if not found then
    generation = layouts[key].last
    bucket = bucket_name(key, generation, hash_of(field))
  end
  redis.call('HSET', bucket, field, generation > 0 and packed(field, value) or value)
end

-- Calls `look` with each bucket of the generations from `generation` to `stop` until it returns something.
local function each_bucket(key, generation, stop, look)
  for g = generation, stop do
    local size = g > 0 and PER_GENERATION ^ g or 1
    for n = 0, size - 1 do
      local found = look(bucket_name(key, g, n))
      if found ~= nil then return found end
    end
  end
end

-- Forgets the first generation if all its buckets are empty, after one of its buckets has become empty.
local function leave_first(key)
  local layout = layouts[key]
  local function look(bucket)
    if redis.call('EXISTS', bucket) == 1 then return true end
  end
  while layout.first <= layout.last and not each_bucket(key, layout.first, layout.first, look) do
    layout.first = layout.first + 1
  end
  if layout.first <= layout.last then return set_layout(key, layout.first, layout.last) end
  redis.call('DEL', key .. ':buckets')
  layouts[key] = {first = 0, last = 0}
end

-- After fields have left these buckets of the first generation.
local function left_buckets(key, names)
  if #names > 0 and redis.call('EXISTS', unpack(names)) < #names then leave_first(key) end
end

-- Adds to `left` a bucket of the first generation that a field has left, once.
local function note_left(left, layout, bucket, generation)
  if generation <= layout.first and not left[bucket] then left[#left + 1], left[bucket] = bucket, true end
end

-- Removes a field from the newest bucket that has it. Returns this bucket and its generation, or nil.
local function bucket_remove(key, field, layout)
  local place = places[field]
  if place and place.key == key and redis.call('HDEL', place.bucket, field) == 1 then return place.bucket, place.generation end
  local hash = hash_of(field)
  for generation = layout.last, layout.first, -1 do
    local bucket = bucket_name(key, generation, hash)
    if redis.call('HDEL', bucket, field) == 1 then return bucket, generation end
  end
  if layout.first > 0 and redis.call('HDEL', key, field) == 1 then return key, 0 end
end

-- Removes fields without reading their values. Returns how many existed.
local function bucket_drop_all(key, fields)
  local layout, count, left = layouts[key] or layout_of(key), 0, {}
  if layout.last == 0 then
    for i = 1, #fields, 1000 do count = count + redis.call('HDEL', key, unpack(fields, i, math.min(i + 999, #fields))) end
    return count
  end
  for _, field in ipairs(fields) do
    local bucket, generation = bucket_remove(key, field, layout)
    if bucket then
      count = count + 1
      note_left(left, layout, bucket, generation)
    end
  end
  left_buckets(key, left)
  return count
end

-- Removes up to 1000 fields. Returns their values, packed or not; false for missing ones.
local function bucket_take_all(key, fields)
  local layout, found, left = layouts[key] or layout_of(key), {}, {}
  if layout.last == 0 then
    found = redis.call('HMGET', key, unpack(fields))
    redis.call('HDEL', key, unpack(fields))
    return found
  end
  for i, field in ipairs(fields) do
    local value, bucket, generation = bucket_find(key, field)
    found[i] = value
    if value then
      redis.call('HDEL', bucket, field)
      note_left(left, layout, bucket, generation)
    end
  end
  left_buckets(key, left)
  return found
end

local function bucket_drop(key, field)
  return bucket_drop_all(key, {field})
end

-- Lets the bucket of a field expire, and the layout with it: not before the last of the buckets.
local function bucket_expire(key, field, ms)
  local _, bucket = bucket_find(key, field)
  redis.call('PEXPIRE', bucket, ms)
  redis.call('PEXPIRE', key .. ':buckets', ms)
end

local function bucket_persist(key)
  local layout = layout_of(key)
  each_bucket(key, layout.first, layout.last, function(bucket) redis.call('PERSIST', bucket) end)
  redis.call('PERSIST', key .. ':buckets')
end

-- Counts the fields of at most `most` buckets, from the bucket with the number `at` on. Returns their count, and the number
-- of the next bucket, or -1 at the end. Begins with 0.
local function bucket_total(key, at, most)
  local layout, total = layout_of(key), at == 0 and redis.call('HLEN', key) or 0
  for g = math.max(layout.first, 1), layout.last do
    local size = PER_GENERATION ^ g
    for number = math.max(at, size), 2 * size - 1 do
      if most == 0 then return total, number end
      total, most = total + redis.call('HLEN', key .. ':' .. number), most - 1
    end
  end
  return total, -1
end
