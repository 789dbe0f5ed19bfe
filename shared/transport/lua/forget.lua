-- forget: deletes an ended job's records before their expiry.
-- ARGV: 3 id
-- Returns {'OK'}, {'LIVE', state} (not changed) or {'GONE'}. Idempotent.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/parts.lua
local id = ARGV[3]
local job_key = P .. 'job:' .. id
local job = read_job(id, 'state', 'tenant', 'held', 'kept_until_ms')
if not job.state then return {'GONE'} end
if not TERMINAL[job.state] then return {'LIVE', job.state} end
local index = index_of(id)
redis.call('DEL', job_key, P .. 'log:' .. id, P .. 'facts:' .. id, P .. 'prompt:' .. id)
redis.call('ZREM', P .. 'prompts', id)
redis.call('ZREM', P .. 'ended:' .. job.state, id)
if index then release_parts(job.tenant or '', index) end
if job.held then release_held(job.tenant, tonumber(job.held), job.kept_until_ms) end
redis.call('ZREM', P .. 'ended:tenant:' .. (job.tenant or ''), id)
bury_record(id, 0)
return {'OK'}
