-- pause: pauses the queue of a model, or resumes it. Jobs are accepted all the same, and their timeouts
-- pass; running jobs continue.
-- ARGV: 3 model, 4 '1' to pause, '0' to resume, 5 who orders it
-- Returns {'OK', whether that changed anything}, {'UNKNOWN'} (no worker announced the model lately) or
-- {'FULL'} (MAX_PAUSED queues are paused).
--@include lib/common.lua
--@include lib/orders.lua
local model, paused = ARGV[3], P .. 'paused'
if ARGV[4] == '0' then return {'OK', redis.call('HDEL', paused, model)} end
if redis.call('HEXISTS', P .. 'models', model) == 0 then return {'UNKNOWN'} end
if redis.call('HEXISTS', paused, model) == 0 and redis.call('HLEN', paused) >= MAX_PAUSED then return {'FULL'} end
redis.call('PEXPIRE', paused, PAUSED_MS)  -- never refused above maxmemory, and the rest may then be written
local changed = redis.call('HSETNX', paused, model, whole(now_ms()) .. '|' .. ARGV[5])
redis.call('PEXPIRE', paused, PAUSED_MS)
return {'OK', changed}
