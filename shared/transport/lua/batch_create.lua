-- batch_create: admit one batch, or refuse it before anything is written.
-- ARGV: 3 id, 4 tenant, 5 endpoint, 6 input file, 7 window (text), 8 window_ms, 9 metadata (JSON or ''),
--   10 life_ms of its output files, 11 life_ms of its record after its end, 12 max open batches, 13 max
--   open batches of the tenant, 14 max records of the tenant, 15 share of the tenant ('' none),
--   16 partitions that its rows are spread over
-- Returns {'OK'}, {'FULL', scope} (total, tenant, store, tenant_store), {'NOFILE'} or {'PURPOSE',
--   purpose of the file}.
-- Idempotent: the same id again (after a lost reply) answers OK and changes nothing.
-- The input is kept for at least a day longer than the batch may take.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/files.lua
--@include lib/batches.lua
local id, tenant, input, window_ms = ARGV[3], ARGV[4], ARGV[6], tonumber(ARGV[8])
local key, mine = P .. 'batch:' .. id, P .. 'batches:' .. tenant
local DAY_MS, MOST_DROPPED = 86400000, 16
if redis.call('EXISTS', key) == 1 then return {'OK'} end
local now = now_ms()
local file = redis.call('HMGET', P .. 'file:' .. input, 'tenant', 'purpose', 'expires_ms')
if file[1] ~= tenant or tonumber(file[3]) <= server_ms() then return {'NOFILE'} end
if file[2] ~= 'batch' then return {'PURPOSE', file[2]} end
local open = redis.call('ZRANGE', P .. 'batches_open', 0, -1)
if #open + 1 > tonumber(ARGV[12]) then return {'FULL', 'total'} end
local num_mine = 0
for _, other in ipairs(open) do
  if redis.call('HGET', P .. 'batch:' .. other, 'tenant') == tenant then num_mine = num_mine + 1 end
end
if num_mine + 1 > tonumber(ARGV[13]) then return {'FULL', 'tenant'} end

local bytes = BATCH_BYTES + BATCH_ERRORS_BYTES + #ARGV[9]
local why = refused_by_store(tenant, bytes, ARGV[15], false)
if why then return {'FULL', why} end

local life_ms = window_ms + tonumber(ARGV[11]) + DAY_MS
redis.call('HSET', key, 'v', SCHEMA_VERSION, 'tenant', tenant, 'endpoint', ARGV[5], 'input', input,
  'window', ARGV[7], 'metadata', ARGV[9], 'out_life_ms', ARGV[10], 'keep_ms', ARGV[11],
  'created_ms', whole(now), 'expires_ms', whole(due_in(window_ms)), 'status', 'validating', 'fence', 0,
  'owner', '', 'lease_ms', 0, 'held', bytes, 'partitions', ARGV[16])
hold(tenant, bytes, life_ms)
redis.call('HSET', key, 'kept_until_ms', keep_held(tenant, bytes, life_ms))
redis.call('PEXPIRE', key, whole(life_ms))
redis.call('ZADD', P .. 'batches_open', whole(now), id)
expire_at_least(P .. 'batches_open', life_ms)
redis.call('HINCRBY', P .. 'file:' .. input, 'uses', 1)
keep_file(input, tenant, server_ms() + window_ms + DAY_MS)
-- Records that have expired, and the oldest that ended where there are too many.
for _, old in ipairs(redis.call('ZRANGE', mine, 0, MOST_DROPPED - 1)) do
  local gone = redis.call('EXISTS', P .. 'batch:' .. old) == 0
  local ended = redis.call('ZSCORE', P .. 'batches_open', old) == false
  if gone or (ended and redis.call('ZCARD', mine) + 1 > tonumber(ARGV[14])) then
    redis.call('ZREM', mine, old)
    drop_batch(old)
  end
end
redis.call('ZADD', mine, whole(now), id)
expire_at_least(mine, life_ms)
return {'OK'}
