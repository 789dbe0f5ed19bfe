-- release: give one running job back to the queue, with its log and without blame.
-- ARGV: 3 id, 4 worker, 5 attempt
-- Returns {'OK'} or {'FENCED'}: not (any more) this attempt's job. A repeat answers FENCED.
--@include lib/common.lua
--@include lib/release.lua
local id, wid = ARGV[3], ARGV[4]
local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner', 'attempt', 'q', 'qid')
if job[1] ~= 'running' or job[2] ~= wid or job[3] ~= ARGV[5] then return {'FENCED'} end
release(id, job[4], job[5], wid)
return {'OK'}
