-- oversubscribe: delivers and claims a few jobs for a worker without a free slot, whose engine preempts
-- sequences of tenants and jobs that hold many slots, or of lower lanes than those of the queues.
-- ARGV: 3 worker, 4 jobs at most, 5 max crashes, 6 ms for which jobs are left to workers with a free slot
--   (0: not at all), 7 ms for which a worker that pulled counts as one, 8 number of tenants to leave out,
--   9.. these tenants, then the queues, those that go first at the front
-- The lane's order is kept: the job of a left-out tenant is taken too when one of another tenant waits
-- close after it. Every 8th job that a worker takes is the oldest waiting one, here too, whatever its
-- tenant holds.
-- The first write is refused above maxmemory: a full server starts no new work.
-- Returns {claims as lib/claim.lua gives them, ms after which jobs left to others may be taken (0 without
--   any), without claims the newest entry of each queue, unless it stopped at its own bound}; no claims and entries without a lease.
-- A lost reply leaves claimed entries in the worker's pending list: reconcile claims them again.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
--@include lib/latch.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
--@include lib/dead_letter.lua
--@include lib/blame.lua
--@include lib/release.lua
--@include lib/served_by.lua
--@include lib/claim.lua
--@include lib/entry.lua
--@include lib/delivered.lua
--@include lib/portion.lua
--@include lib/orders.lua
local wid, left, max_crashes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local defer_ms, asking_ms, num_tenants = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local lease = P .. 'w:' .. wid
if redis.call('EXISTS', lease) == 0 then return {{}, 0, {}} end
local OLDEST_EVERY, CLOSE, MAX_ROUNDS = 8, 4, 64
local all = {}
for i = 9 + num_tenants, #ARGV do all[#all + 1] = ARGV[i] end
local queues = open_queues(wid, all)
local taken = tonumber(redis.call('HGET', lease, 'taken') or '0')
redis.call('HSET', lease, 'taken', taken)  -- not `pull_ms`: no job is deferred to it (lib/portion.lua)
local left_out, claims, rounds = {}, {}, 0
for i = 9, 8 + num_tenants do left_out[ARGV[i]] = true end

-- The next entries of the lane; none where there is no lane.
local function next_of(queue, count)
  if redis.call('EXISTS', queue) == 0 then return {} end
  return redis.call('XRANGE', queue, '(' .. last_delivered(queue), '+', 'COUNT', count)
end

-- Whether the next job of the lane, or one close after it, is of a tenant that is not left out. Jobs that were
-- claimed ahead (lib/affinity.lua) run already.
local function is_wanted(queue)
  local num_waiting = 0
  for _, item in ipairs(next_of(queue, MAX_ROUNDS)) do
    local id = read_entry(item[2])
    local job = id and redis.call('HMGET', P .. 'job:' .. id, 'tenant', 'state')
    if not job or not job[1] then return false end  -- `pull` removes it
    if job[2] ~= 'running' then
      if not left_out[job[1]] then return true end
      num_waiting = num_waiting + 1
      if num_waiting == CLOSE then return false end
    end
  end
  return false
end

-- False: the lane has no group (yet), or nothing was delivered.
local function take(queue)
  local got = redis.pcall('XREADGROUP', 'GROUP', GROUP, wid, 'COUNT', 1, 'STREAMS', queue, '>')
  if not got or got.err or not got[1] then return false end
  local item = got[1][2][1]
  local id = read_entry(item[2])
  local result = claim(id, queue, item[1], wid, false, max_crashes, true)
  if result[1] == 'OK' then
    claims[#claims + 1] = result
    left, taken = left - 1, taken + 1
  elseif result[1] == 'NEWER' or result[1] == 'WAITS' then
    redis.call('XCLAIM', queue, GROUP, RELEASED, 0, item[1], 'JUSTID')
  elseif result[1] == 'HELD' and result[2] ~= wid then
    redis.call('XCLAIM', queue, GROUP, result[2], 0, item[1], 'JUSTID')
  end
  rounds = rounds + 1
  return true
end

local function take_oldest()
  local oldest, head
  for _, queue in ipairs(queues) do
    local first = next_of(queue, 1)[1]
    if first and (not head or is_after(head, first[1])) then oldest, head = queue, first[1] end
  end
  if oldest then take(oldest) end
end

-- Whether another worker has a free slot: it has pulled lately, and did not fill up.
local function is_beside_a_free_one()
  local num = 0
  for _ in pairs(askers(wid, all, {}, asking_ms)) do num = num + 1 end
  return num > 1
end

-- For how long the next job of the lane is left to the others; 0 if its age is not known, because the
-- server's clock was set back.
local function left_ms(queue)
  local waits_ms = server_ms() - tonumber(string.match(next_of(queue, 1)[1][1], '^%d+'))
  return waits_ms >= 0 and waits_ms < defer_ms and defer_ms - waits_ms or 0
end

local defers, deferred_ms = nil, 0
for _, queue in ipairs(queues) do
  while left > 0 and rounds < MAX_ROUNDS and is_wanted(queue) do
    if defers == nil then defers = defer_ms > 0 and is_beside_a_free_one() end
    local wait_ms = defers and left_ms(queue) or 0
    if wait_ms > 0 then
      deferred_ms = math.max(deferred_ms, wait_ms)
      break
    elseif taken % OLDEST_EVERY == OLDEST_EVERY - 1 then
      local before = taken
      take_oldest()
      if taken == before then taken = taken + 1 end  -- it could not be taken: its turn is over
    elseif not take(queue) then
      break
    end
  end
end
if #claims > 0 then redis.call('HSET', lease, 'taken', taken) end
local last = {}
for k, queue in ipairs(#claims == 0 and rounds < MAX_ROUNDS and all or {}) do
  local newest = redis.call('XREVRANGE', queue, '+', '-', 'COUNT', 1)
  last[k] = newest[1] and newest[1][1] or '0-0'
end
return {claims, math.ceil(deferred_ms), last}
