-- oversubscribe: deliver and claim a few jobs for a worker without a free place, whose engine takes
-- seats from those that hold many.
-- ARGV: 3 worker, 4 jobs at most, 5 max crashes, 6 number of tenants to leave out, 7.. these tenants,
--   then the queues, those that go first at the front
-- Of each lane only what is next in it is looked at: nothing is taken out of its order.
-- Returns claims as lib/claim.lua gives them; nothing without a lease.
-- A lost reply leaves claimed entries in the worker's pending list: reconcile claims them again.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/latch.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
--@include lib/dead_letter.lua
--@include lib/blame.lua
--@include lib/claim.lua
--@include lib/entry.lua
--@include lib/delivered.lua
local wid, left, max_crashes, num_tenants = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local lease = P .. 'w:' .. wid
if redis.call('EXISTS', lease) == 0 then return {} end
local left_out, claims = {}, {}
for i = 7, 6 + num_tenants do left_out[ARGV[i]] = true end

-- The tenant of the job that is next in the lane; nil: there is none, or nothing that can be taken.
local function next_tenant(queue)
  if redis.call('EXISTS', queue) == 0 then return nil end
  local head = redis.call('XRANGE', queue, '(' .. last_delivered(queue), '+', 'COUNT', 1)[1]
  local id = head and read_entry(head[2])
  return id and redis.call('HGET', P .. 'job:' .. id, 'tenant')
end

for i = 7 + num_tenants, #ARGV do
  local queue = ARGV[i]
  while left > 0 do
    local tenant = next_tenant(queue)
    if not tenant or left_out[tenant] then break end
    local got = redis.call('XREADGROUP', 'GROUP', GROUP, wid, 'COUNT', 1, 'STREAMS', queue, '>')
    if not got or not got[1] then break end
    local item = got[1][2][1]
    local id = read_entry(item[2])
    local result = claim(id, queue, item[1], wid, false, max_crashes, true)
    if result[1] == 'OK' then
      claims[#claims + 1] = result
    elseif result[1] == 'NEWER' or result[1] == 'WAITS' then
      redis.call('XCLAIM', queue, GROUP, RELEASED, 0, item[1], 'JUSTID')
    elseif result[1] == 'HELD' and result[2] ~= wid then
      redis.call('XCLAIM', queue, GROUP, result[2], 0, item[1], 'JUSTID')
    end
    left = left - 1
  end
end
return claims
