-- batch_save: stores the owner's progress of its batch; renews the lease.
-- ARGV: 3 id, 4 fence, 5 lease_ms (0: give the batch back), 6 next status ('' unchanged), 7 number of
--   fields f, then f names and values, then ids of jobs whose results are saved with this
-- Returns {'OK', status, milliseconds left}, {'FENCED'}, or {'OVER', status}: it has ended, or is gone.
-- A batch that is being cancelled stays so: the status in the reply is the one that counts.
-- Idempotent: all values are absolute. The jobs' records are not needed any more and soon expire, but
--   for those with a longer retain_ms.
-- PEXPIRE is first: never refused above maxmemory, and the rest may then be written too.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
--@include lib/batches.lua
--@include lib/saved.lua
local BEFORE = {in_progress = 'validating', finalizing = 'in_progress'}
local id, fence, lease_ms, wanted = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local key = P .. 'batch:' .. id
local batch = redis.call('HMGET', key, 'status', 'fence', 'expires_ms', 'owner')
local status = batch[1]
if not status then return {'OVER', 'gone'} end
if batch[2] ~= fence then return {'FENCED'} end
if BATCH_OVER[status] then return {'OVER', status} end
redis.call('PEXPIRE', key, whole(redis.call('PTTL', key)))
if wanted ~= '' and BEFORE[wanted] == status then
  set_status(key, wanted)
  status = wanted
end
local last_field = 7 + 2 * tonumber(ARGV[7])
for i = 8, last_field, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
local now = now_ms()
redis.call('HSET', key, 'lease_ms', whole(lease_ms == 0 and 0 or due_in(lease_ms)))
if lease_ms == 0 then redis.call('HSET', key, 'owner', '') end
for i = last_field + 1, #ARGV do keep_saved(ARGV[i]) end
return {'OK', status, whole(math.max(0, tonumber(batch[3]) - now))}
