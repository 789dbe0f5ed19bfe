-- release: give one running job back to the queue, with its log and without blame.
-- ARGV: 3 id, 4 worker, 5 attempt
-- Returns {'OK'} or {'FENCED'}: not (any more) this attempt's job. A repeat answers FENCED.
--@include lib/common.lua
--@include lib/release.lua
local id, wid = ARGV[3], ARGV[4]
local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner', 'attempt', 'q', 'qid', 'tenant',
  'prompt_tokens')
if job[1] ~= 'running' or job[2] ~= wid or job[3] ~= ARGV[5] then return {'FENCED'} end
release(id, {queue = job[4], entry = job[5], tenant = job[6], prompt_tokens = job[7]}, wid)
return {'OK'}
