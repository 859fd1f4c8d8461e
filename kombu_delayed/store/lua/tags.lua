-- tags: read the tags of the messages that a consumer holds, and of those that have slots, acked or not.
-- Read-only.
-- keys: unacked gate
-- arguments: consumer cursor count:number
--   count: about how many tags a call reads
-- returns {the next cursor, '0' at the end, {tag, …}, {tag with slots, …}} in no order; slots are in the first page
local page = redis.call('HSCAN', unacked, cursor, 'COUNT', count)
local tags, slots = {}, {}
for i = 1, #page[2], 2 do tags[#tags + 1] = page[2][i] end
if cursor == '0' then slots = redis.call('HKEYS', gate .. 'slots:' .. consumer) end
return {page[1], tags, slots}
