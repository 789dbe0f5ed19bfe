-- submit: admit one job, or refuse it before anything is written.
-- ARGV: 3 id, 4 model, 5 lane, 6 tenant, 7 kind, 8 request, 9 timeout_ms, 10 prompt_tokens,
--   11 max queued jobs, 12 max queued tokens, 13 max queued jobs of the tenant,
--   14 reader ('' nobody), 15 grace policy, 16 client request id, 17 frontend lease ms
-- Returns {'OK', entry}, {'DUP', state} or {'FULL', scope, queued jobs}.
-- Idempotent: the same id again (after a lost reply) answers DUP and changes nothing.
-- XADD is the first write, so above maxmemory the whole submit is refused.
--@include lib/common.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
local id, model, tenant, prompt_tokens = ARGV[3], ARGV[4], ARGV[6], tonumber(ARGV[10])
local timeout_ms, reader = tonumber(ARGV[9]), ARGV[14]
local job_key, tenant_key = P .. 'job:' .. id, P .. 'tenant:' .. tenant
local state = redis.call('HGET', job_key, 'state')
if state then return {'DUP', state} end

local stat = redis.call('HMGET', P .. 'stat', 'queued', 'queued_tokens')
local queued, queued_tokens = tonumber(stat[1] or '0'), tonumber(stat[2] or '0')
if queued + 1 > tonumber(ARGV[11]) then return {'FULL', 'total', whole(queued)} end
if queued_tokens + prompt_tokens > tonumber(ARGV[12]) then return {'FULL', 'tokens', whole(queued)} end
local tenant_queued = tonumber(redis.call('HGET', tenant_key, 'queued') or '0')
if tenant_queued + 1 > tonumber(ARGV[13]) then return {'FULL', 'tenant', whole(tenant_queued)} end

local now = now_ms()
local queue = P .. 'q:' .. model .. ':' .. ARGV[5]
local life_ms = timeout_ms + LEFTOVER_MS
local entry = redis.call('XADD', queue, '*', 'v', SCHEMA_VERSION, 'id', id)
expire_at_least(queue, life_ms)
redis.call('HSET', job_key, 'v', SCHEMA_VERSION, 'state', 'queued', 'model', model, 'tenant', tenant,
  'kind', ARGV[7], 'attempt', 0, 'crashes', 0, 'n', 0, 'b', 0, 'prompt_tokens', ARGV[10], 'q', queue,
  'qid', entry, 'sub_ms', whole(now), 'deadline_ms', whole(now + timeout_ms), 'fe', reader,
  'og', ARGV[15], 'crid', ARGV[16])
redis.call('PEXPIRE', job_key, whole(life_ms))
redis.call('SET', P .. 'req:' .. id, ARGV[8], 'PX', whole(life_ms))
redis.call('ZADD', P .. 'live', whole(now + timeout_ms), id)
expire_at_least(P .. 'live', life_ms)
count_job(tenant, prompt_tokens, 'queued', 1)
expire_at_least(tenant_key, life_ms)
-- Who submits is alive: without this a frontend's first job could look orphaned before its first beat.
local frontend = frontend_of(reader)
if frontend then
  redis.call('SET', P .. 'f:' .. frontend, '1', 'PX', ARGV[17], 'NX')
end
return {'OK', entry}
