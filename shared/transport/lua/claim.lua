-- claim: make one entry that was delivered to this worker its job (again).
-- ARGV: 3 worker, 4 queue, 5 entry, 6 id, 7 max crashes
-- Returns what lib/claim.lua gives, {'NOLEASE'}, or {'TAKEN'}: the entry is not (any more) in this worker's
--   pending list. Its lease had ended, and another worker has the job: it would lose what it computes.
-- Repeating it is safe: each claim fences the one before.
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
local wid, queue, entry, id = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
if redis.call('EXISTS', P .. 'w:' .. wid) == 0 then return {'NOLEASE'} end
if #redis.call('XPENDING', queue, GROUP, entry, entry, 1, wid) == 0 then return {'TAKEN'} end
local result = claim(id, queue, entry, wid, false, tonumber(ARGV[7]))
if result[1] == 'NEWER' or result[1] == 'WAITS' then
  redis.call('XCLAIM', queue, GROUP, RELEASED, 0, entry, 'JUSTID')
end
return result
