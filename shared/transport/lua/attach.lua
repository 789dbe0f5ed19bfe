-- attach: a reader has come: the orphan clock stops, and only this reader's leaving starts it again.
-- ARGV: 3 id, 4 reader ("<frontend>#<n>"), 5 frontend lease ms
-- Returns {'OK', state} or {'GONE'}. Idempotent.
--@include lib/common.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
local job_key, reader = P .. 'job:' .. ARGV[3], ARGV[4]
local state = redis.call('HGET', job_key, 'state')
if not state then return {'GONE'} end
redis.call('HDEL', job_key, 'orphan_ms')
redis.call('HSET', job_key, 'fe', reader)
local frontend = frontend_of(reader)
if frontend then redis.call('SET', P .. 'f:' .. frontend, '1', 'PX', ARGV[5], 'NX') end
return {'OK', state}
