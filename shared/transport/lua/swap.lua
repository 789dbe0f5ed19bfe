-- swap: claims a model for a worker that is about to load it, so that one worker does so for the jobs
-- that wait. An idle worker takes the claim of one that still drains.
-- ARGV: 3 worker, 4 model, 5 life_ms of the claim, which offer.lua renews, 6 '1' if no other worker may
--   serve it, 7 '1' while this worker runs jobs of another model
-- Returns 1, or 0: another worker has claimed it, or serves it by now.
--@include lib/common.lua
--@include lib/offers.lua
local wid, model, life_ms, must_be_unserved, drains = ARGV[3], ARGV[4], ARGV[5], ARGV[6] == '1', ARGV[7] == '1'
local holder, holder_drains = claim_of(model)
if holder and holder ~= wid and (drains or not holder_drains) then return 0 end
if must_be_unserved and count_serving()[model] then return 0 end
redis.call('SET', P .. 'swap:' .. model, (drains and 'drains:' or '') .. wid, 'PX', life_ms)
return 1
