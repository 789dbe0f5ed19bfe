-- swap: claims a model for a worker that is about to load it, so that one worker does so for the jobs
-- that wait.
-- ARGV: 3 worker, 4 model, 5 life_ms of the claim, which offer.lua renews, 6 '1' if no other worker may
--   serve it
-- Returns 1, or 0: another worker has claimed it, or serves it by now.
--@include lib/common.lua
--@include lib/offers.lua
local wid, model, life_ms, must_be_unserved = ARGV[3], ARGV[4], ARGV[5], ARGV[6] == '1'
local claim = P .. 'swap:' .. model
local holder = redis.call('GET', claim)
if holder and holder ~= wid then return 0 end
if must_be_unserved and serving_workers(wid)[model] then return 0 end
redis.call('SET', claim, wid, 'PX', life_ms)
return 1
