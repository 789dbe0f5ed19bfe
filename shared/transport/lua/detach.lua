-- detach: removes a reader. Starts the job's grace, or cancels the job at once if it has no grace.
-- ARGV: 3 id, 4 reader, 5 how long the log of a job that its reader saw end is kept (ms), unless the
--   job has its own time
-- Returns {'OK', state} or {'NOOP'}: no such job, or a newer reader is attached. Idempotent.
-- A job submitted by a frontend (without "#<n>") may be left by any reader of that frontend.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/latch.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
local id, reader = ARGV[3], ARGV[4]

-- Only the log: the record is kept longer.
local function shorten_log(ms)
  redis.call('PEXPIRE', P .. 'log:' .. id, ms)
  local ended = read_job(id, 'tenant', 'n', 'b', 'lp_bytes', 'held', 'kept_until_ms')
  local bytes = log_bytes_of(ended)
  if ended.held and keep_held_for(ended.tenant, bytes, ended.kept_until_ms, tonumber(ms)) then
    redis.call('HSET', P .. 'job:' .. id, 'held', whole(tonumber(ended.held) - bytes))
  end
end

local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'fe', 'og', 'orphan_ms', 'retain_ms')
if not job[1] or (job[2] ~= reader and job[2] ~= frontend_of(reader)) then return {'NOOP'} end
if TERMINAL[job[1]] then
  if not job[5] and redis.call('PTTL', P .. 'log:' .. id) > tonumber(ARGV[5]) then
    shorten_log(ARGV[5])
  end
  return {'NOOP'}
end
if (job[3] or '') == '' then return {'NOOP'} end
if job[3] == '0' then
  latch(id, {state = 'cancelled', reason = 'disconnected', by = 'ctl'})
  return {'OK', 'cancelled'}
end
if (job[4] or '') == '' then
  redis.call('HSET', P .. 'job:' .. id, 'orphan_ms', whole(due_in(tonumber(job[3]))))
end
return {'OK', job[1]}
