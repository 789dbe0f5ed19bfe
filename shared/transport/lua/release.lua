-- release: give one running job back to the queue, with its log and without blame.
-- ARGV: 3 id, 4 worker, 5 attempt, 6 how often it was preempted for jobs of higher lanes, where it is given
--   back because it waits for its slot again; else 0
-- Returns {'OK'} or {'FENCED'}: not (any more) this attempt's job. A repeat answers FENCED.
--@include lib/common.lua
--@include lib/release.lua
local id, wid = ARGV[3], ARGV[4]
local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner', 'attempt', 'q', 'qid')
if job[1] ~= 'running' or job[2] ~= wid or job[3] ~= ARGV[5] then return {'FENCED'} end
local preemptions = tonumber(ARGV[6])
release(id, job[4], job[5], wid, nil, preemptions > 0 and 'preempted' or nil)
if preemptions > 0 then redis.call('HSET', P .. 'job:' .. id, 'preemptions', preemptions) end
return {'OK'}
