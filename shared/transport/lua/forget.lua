-- forget: what is kept of an ended job goes before its time.
-- ARGV: 3 id
-- Returns {'OK'}, {'LIVE', state} (left as it is) or {'GONE'}. Idempotent.
--@include lib/common.lua
local id = ARGV[3]
local job_key = P .. 'job:' .. id
local state, tenant = unpack(redis.call('HMGET', job_key, 'state', 'tenant'))
if not state then return {'GONE'} end
if not TERMINAL[state] then return {'LIVE', state} end
redis.call('DEL', job_key, P .. 'log:' .. id, P .. 'facts:' .. id, P .. 'prompt:' .. id)
redis.call('ZREM', P .. 'prompts', id)
redis.call('ZREM', P .. 'ended:' .. state, id)
redis.call('ZREM', P .. 'ended:tenant:' .. (tenant or ''), id)
bury_record(id, 0)
return {'OK'}
