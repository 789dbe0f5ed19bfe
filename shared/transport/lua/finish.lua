-- finish: end a job outside a step: cancel (unfenced) or a worker's refusal (fenced).
-- ARGV: 3 id, 4 worker ('' unfenced), 5 attempt, 6 state, 7 reason, 8 message
-- Returns {'OK', state, n} when this call ended it, {'TERM', state, n} when it had ended already (the
--   winner's state), {'FENCED'} or {'GONE'}.
-- Idempotent: the latch falls once.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/latch.lua
local id, wid = ARGV[3], ARGV[4]
local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner', 'attempt', 'n')
if not job[1] then return {'GONE'} end
if TERMINAL[job[1]] then return {'TERM', job[1], job[4] or '0'} end
if wid ~= '' and (job[2] ~= wid or job[3] ~= ARGV[5]) then return {'FENCED'} end
return latch(id, {state = ARGV[6], reason = ARGV[7], message = ARGV[8],
  by = wid == '' and 'ctl' or wid})
