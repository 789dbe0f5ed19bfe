-- batch_drop: delete the record of one's own batch that has ended; its files stay.
-- ARGV: 3 id, 4 tenant
-- Returns {'OK'}, {'GONE'}, or {'OPEN', status}: it has not ended.
-- Idempotent: a repeat answers GONE.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/batches.lua
local batch = redis.call('HMGET', P .. 'batch:' .. ARGV[3], 'tenant', 'status')
if batch[1] ~= ARGV[4] then return {'GONE'} end
if not BATCH_OVER[batch[2]] then return {'OPEN', batch[2]} end
drop_batch(ARGV[3])
return {'OK'}
