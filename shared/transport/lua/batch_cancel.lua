-- batch_cancel: requests the end of a batch; its owner cancels running rows and keeps finished ones.
-- ARGV: 3 id, 4 tenant
-- Returns {'OK', status} or {'GONE'}. A batch without an owner ends here; one that is finalizing or
--   has ended is not changed.
-- Idempotent.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/batches.lua
local key = P .. 'batch:' .. ARGV[3]
local batch = redis.call('HMGET', key, 'tenant', 'status', 'fence')
if batch[1] ~= ARGV[4] then return {'GONE'} end
if batch[2] ~= 'validating' and batch[2] ~= 'in_progress' then return {'OK', batch[2]} end
-- Never refused above maxmemory, and then the rest may be written too.
redis.call('PEXPIRE', key, whole(redis.call('PTTL', key)))
set_status(key, 'cancelling')
if batch[3] == '0' then end_batch(ARGV[3], 'cancelled') end
return {'OK', redis.call('HGET', key, 'status')}
