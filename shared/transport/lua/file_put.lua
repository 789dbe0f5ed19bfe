-- file_put: make a file known whose bytes are on disk, or refuse it before anything is written.
-- ARGV: 3 id, 4 tenant, 5 purpose, 6 name, 7 bytes, 8 parts (JSON), 9 life_ms, 10 max files, 11 max
--   bytes, 12 max files of the tenant, 13 max bytes of the tenant, 14 share of the tenant ('' none)
-- Returns {'OK', created_ms, expires_ms} or {'FULL', scope}: files, bytes, tenant_files, tenant_bytes,
--   store, tenant_store.
-- Idempotent: the same id again (after a lost reply) answers OK with the times of the first.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/files.lua
local id, tenant, bytes = ARGV[3], ARGV[4], tonumber(ARGV[7])
local key = P .. 'file:' .. id
if redis.call('EXISTS', key) == 0 then
  local known = redis.call('HMGET', P .. 'files_bytes', 'total', 'of:' .. tenant)
  if redis.call('ZCARD', P .. 'files') + 1 > tonumber(ARGV[10]) then return {'FULL', 'files'} end
  if tonumber(known[1] or '0') + bytes > tonumber(ARGV[11]) then return {'FULL', 'bytes'} end
  if redis.call('ZCARD', P .. 'files:' .. tenant) + 1 > tonumber(ARGV[12]) then
    return {'FULL', 'tenant_files'}
  end
  if tonumber(known[2] or '0') + bytes > tonumber(ARGV[13]) then return {'FULL', 'tenant_bytes'} end
  local why = refused_by_store(tenant, file_bytes(ARGV[6], ARGV[8]), ARGV[14], false)
  if why then return {'FULL', why} end
  put_file(id, {tenant = tenant, purpose = ARGV[5], name = ARGV[6], bytes = ARGV[7], parts = ARGV[8],
    life_ms = ARGV[9]})
end
local times = redis.call('HMGET', key, 'created_ms', 'expires_ms')
return {'OK', times[1], times[2]}
