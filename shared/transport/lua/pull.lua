-- pull: deliver up to `count` new entries to this worker and claim each, in one step.
-- ARGV: 3 worker, 4 count, 5 max crashes, 6.. queues, those that go first at the front
-- Returns {'OK', claims, more, last}: `claims` as lib/claim.lua gives them, `more` = 1 when the sweep
--   stopped at its own bound, `last` the newest entry of each queue when there was nothing to claim
--   (whoever waits for work waits for what comes after it); {'NOLEASE'} without a lease (a thawed
--   worker must beat first).
-- A lost reply leaves claimed entries in the worker's pending list: reconcile claims them again.
-- The first write is refused above maxmemory, before anything is delivered: a full server starts
-- no new work, and what runs can end.
--@include lib/common.lua
--@include lib/latch.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
--@include lib/blame.lua
--@include lib/claim.lua
local wid, count, max_crashes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local MAX_ROUNDS = 32
if redis.call('EXISTS', P .. 'w:' .. wid) == 0 then return {'NOLEASE'} end
redis.call('HSET', P .. 'w:' .. wid, 'pull_ms', whole(now_ms()))

local claims, rounds = {}, 0
for i = 6, #ARGV do
  local queue = ARGV[i]
  while #claims < count do
    if rounds >= MAX_ROUNDS then return {'OK', claims, 1, {}} end
    local got = redis.call('XREADGROUP', 'GROUP', GROUP, wid, 'COUNT', whole(count - #claims),
      'STREAMS', queue, '>')
    if not got or not got[1] then break end
    rounds = rounds + 1
    for _, item in ipairs(got[1][2]) do
      local entry, fields, id = item[1], item[2], nil
      for k = 1, #fields, 2 do if fields[k] == 'id' then id = fields[k + 1] end end
      local result = id and claim(id, queue, entry, wid, false, max_crashes) or {'GONE'}
      if not id then drop_entry(queue, entry) end
      if result[1] == 'OK' then
        claims[#claims + 1] = result
      elseif result[1] == 'NEWER' then
        redis.call('XCLAIM', queue, GROUP, RELEASED, 0, entry, 'JUSTID')
      end
    end
  end
end
local last = {}
if #claims == 0 then
  for i = 6, #ARGV do
    local newest = redis.call('XREVRANGE', ARGV[i], '+', '-', 'COUNT', 1)
    last[#last + 1] = newest[1] and newest[1][1] or '0-0'
  end
end
return {'OK', claims, 0, last}
