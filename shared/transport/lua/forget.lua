-- forget: deletes an ended job's records before their expiry.
-- ARGV: 3 id
-- Returns {'OK'}, {'LIVE', state} (not changed) or {'GONE'}. Idempotent.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
local id = ARGV[3]
local job = read_job(id, 'state', 'tenant', 'held', 'kept_until_ms', 'held_log', 'log_kept_until_ms')
if not job.state then return {'GONE'} end
if not TERMINAL[job.state] then return {'LIVE', job.state} end
delete_text(id)
delete_record(id, job)
release_text(job)
release_record(job)
-- Without sentences: a job that was deleted on request has not expired.
redis.call('SET', P .. 'tombstone:' .. id, '', 'PX', TOMBSTONE_MS)
return {'OK'}
