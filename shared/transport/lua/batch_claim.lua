-- batch_claim: give this frontend a batch without an owner: new, released, or with an ended lease.
-- ARGV: 3 frontend, 4 lease_ms, then ids that it does not want (it cannot read their files)
-- Returns {id, fence} or {}.
-- The tenant with the fewest running batches comes first, then age. A lost reply costs one lease.
--@include lib/common.lua
--@include lib/pulse.lua
local SCANNED = 1000
local now, unwanted, running, first, order = now_ms(), {}, {}, {}, {}
for i = 5, #ARGV do unwanted[ARGV[i]] = true end
for _, id in ipairs(redis.call('ZRANGE', P .. 'batches_open', 0, SCANNED - 1)) do
  local batch = redis.call('HMGET', P .. 'batch:' .. id, 'tenant', 'owner', 'lease_ms')
  local tenant = batch[1]
  if not tenant then
    redis.call('ZREM', P .. 'batches_open', id)
  elseif batch[2] ~= '' and (now < tonumber(batch[3]) or leases_mean_nothing()) then
    running[tenant] = (running[tenant] or 0) + 1
  elseif not unwanted[id] and not first[tenant] then
    first[tenant] = id
    order[#order + 1] = tenant
  end
end
local best = nil
for _, tenant in ipairs(order) do
  if not best or (running[tenant] or 0) < (running[best] or 0) then best = tenant end
end
if not best then return {} end
local key = P .. 'batch:' .. first[best]
-- Never refused above maxmemory, and then the rest may be written too.
redis.call('PEXPIRE', key, whole(redis.call('PTTL', key)))
local fence = redis.call('HINCRBY', key, 'fence', 1)
redis.call('HSET', key, 'owner', ARGV[3], 'lease_ms', whole(due_in(tonumber(ARGV[4]))))
return {first[best], tostring(fence)}
