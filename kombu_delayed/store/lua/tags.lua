-- tags: which messages a consumer holds and which have slots, whether they were acked or not.
-- Twice is safe: it only reads.
-- keys: unacked gate
-- arguments: consumer cursor count:number
--   count: tags a call, about
-- returns {the next cursor ('0': that was all), {tag, …}, {tag with slots, …}} in no order; slots are in the first page
local page = redis.call('HSCAN', unacked, cursor, 'COUNT', count)
local tags, slots = {}, {}
for i = 1, #page[2], 2 do tags[#tags + 1] = page[2][i] end
if cursor == '0' then slots = redis.call('HKEYS', gate .. 'slots:' .. consumer) end
return {page[1], tags, slots}
