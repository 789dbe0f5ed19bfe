-- heartbeat: renew a worker's lease, store its report, and return which of its jobs to drop.
-- ARGV: 3 worker, 4 lease_ms, 5 models (JSON list), 6 testimony (lib/pulse.lua), 7 number of accounts,
--   then as many triples (lib/accounts.lua), number of fields f, f names and values, id and attempt of each
--   job it runs
-- Returns {what `pulse` returns, ids to drop, ids that the server has lost, ids to drop that have a later
--   attempt, an operator's order (lib/orders.lua; '' none is stored), number of workers, prefixes noted of
--   this one (prefixes.lua)}. To drop: ended, taken by another worker, orphaned or past the deadline (these two are ended
--   here). A job that this worker has
--   meanwhile claimed again is not among them: a heartbeat that is older than the claim must not undo it.
--   Lost: there is no such job, or the claim is missing; restore.lua decides whether that worker may put
--   it back.
-- PEXPIRE is first: never refused above maxmemory, and the rest may then be written too.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
--@include lib/latch.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
--@include lib/accounts.lua
--@include lib/orders.lua
local wid, lease_ms = ARGV[3], ARGV[4]
local lease = P .. 'w:' .. wid
redis.call('PEXPIRE', lease, lease_ms)
local seen = pulse(ARGV[6])
local first = charge_accounts(8, tonumber(ARGV[7])) + 1
local jobs = first + 2 * tonumber(ARGV[first - 1])
for i = first, jobs - 1, 2 do redis.call('HSET', lease, ARGV[i], ARGV[i + 1]) end
redis.call('HSET', lease, 'beat_ms', whole(server_ms()), 'lease_ms', lease_ms, 'models', ARGV[5])
local order = order_of(wid)
if order ~= '' then redis.call('HSET', lease, 'order', order) end
if takes_nothing(order) then redis.call('HSET', lease, 'draining', 1) end
redis.call('PEXPIRE', lease, lease_ms)
redis.call('PEXPIRE', P .. 'prefixes:' .. wid, lease_ms)
redis.call('HSET', P .. 'workers', wid, ARGV[5])
local drop, lost, taken = {}, {}, {}
for i = jobs, #ARGV, 2 do
  local id, attempt = ARGV[i], ARGV[i + 1]
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner', 'attempt', 'fe', 'orphan_ms',
    'og', 'deadline_ms')
  if not job[1] or (not TERMINAL[job[1]] and tonumber(job[3]) < tonumber(attempt)) then
    lost[#lost + 1] = id
  elseif job[1] ~= 'running' or job[2] ~= wid then
    drop[#drop + 1] = id
    if tonumber(job[3]) > tonumber(attempt) then taken[#taken + 1] = id end
  elseif job[3] == attempt then
    if now_ms() >= tonumber(job[7]) then
      latch(id, {state = 'expired', reason = 'deadline_exceeded', by = wid})
      drop[#drop + 1] = id
    elseif orphaned(id, job[4], job[5], job[6]) then
      latch(id, {state = 'cancelled', reason = 'orphaned', by = wid})
      drop[#drop + 1] = id
    end
  end
end
return {seen, drop, lost, taken, order, redis.call('HLEN', P .. 'workers'),
  redis.call('SCARD', P .. 'prefixes:' .. wid)}
