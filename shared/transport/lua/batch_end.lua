-- batch_end: the owner ends its batch, and its output becomes files.
-- ARGV: 3 id, 4 fence, 5 status, 6 errors (JSON or ''), 7 number of files f, then 5 per file: field of
--   the batch that names it, id, name, bytes, parts (JSON); then names of blobs that are of no use
-- Returns {'OK', status}, {'FENCED'}, or {'OVER', status}: it has ended (by an earlier try of this, or
--   was cancelled before it started), or is gone.
-- A batch that is being cancelled ends cancelled, whatever its owner requests.
-- PEXPIRE is first: never refused above maxmemory, and the rest may then be written too.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/files.lua
--@include lib/batches.lua
local id, status = ARGV[3], ARGV[5]
local key = P .. 'batch:' .. id
local batch = redis.call('HMGET', key, 'status', 'fence', 'tenant', 'out_life_ms')
if not batch[1] then return {'OVER', 'gone'} end
if batch[2] ~= ARGV[4] then return {'FENCED'} end
if BATCH_OVER[batch[1]] then return {'OVER', batch[1]} end
if batch[1] == 'cancelling' then status = 'cancelled' end
redis.call('PEXPIRE', key, whole(redis.call('PTTL', key)))
local last_file = 7 + 5 * tonumber(ARGV[7])
for i = 8, last_file, 5 do
  redis.call('HSET', key, ARGV[i], ARGV[i + 1])
  put_file(ARGV[i + 1], {tenant = batch[3], purpose = 'batch_output', name = ARGV[i + 2],
    bytes = ARGV[i + 3], parts = ARGV[i + 4], life_ms = batch[4]})
end
local useless = {}
for i = last_file + 1, #ARGV do useless[#useless + 1] = ARGV[i] end
forget_blobs(useless)
redis.call('HSET', key, 'errors', ARGV[6])
end_batch(id, status)
return {'OK', status}
