-- crashed: this worker's engine died with these jobs: they go back to the queue, blamed as recover
-- blames the jobs of a worker that died.
-- ARGV: 3 worker, 4 max crashes, 5 cause (see CrashCause), then id and attempt of each job that was
--   in the engine
-- Returns one reply per job: 'released', 'ended' (it has reached the limit of deaths), or 'fenced': not
-- (any more) this attempt's job. A repeat returns fenced or ended.
-- Only the job named in probe:<worker> is blamed; without a name, all are. For
-- an error of the device none is blamed but the named one, on a device that had worked for others; for
-- an outage of upstreams none is. Both count as losses (see note_loss): the tenth without a token ends
-- the job. An engine that hung makes suspects of its jobs at once.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
--@include lib/latch.lua
--@include lib/dead_letter.lua
--@include lib/blame.lua
--@include lib/release.lua
local wid, max_crashes, cause = ARGV[3], tonumber(ARGV[4]), ARGV[5]
-- Never refused above maxmemory, and then the rest may be written too.
redis.call('PEXPIRE', P .. 'probe:' .. wid, 3600000)
local named = redis.call('GET', P .. 'probe:' .. wid)
local ENDS = {engine = 'engine_died', stall = 'engine_stalled', device = 'device_lost',
  proven_device = 'device_lost', upstream = 'upstream_lost'}
local words = {}

local function is_over(id)
  if cause == 'engine' then
    return (not named or named == id) and blame(id, wid, max_crashes, 'engine_died')
  end
  if cause == 'stall' then
    return (not named or named == id) and note_stall(id, wid, max_crashes, named == id)
  end
  return note_loss(id, wid, max_crashes, named == id and cause == 'proven_device')
end

for i = 6, #ARGV, 2 do
  local id, word = ARGV[i], 'released'
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner', 'attempt', 'q', 'qid')
  if job[1] and TERMINAL[job[1]] then
    word = 'ended'
  elseif job[1] ~= 'running' or job[2] ~= wid or job[3] ~= ARGV[i + 1] then
    word = 'fenced'
  else
    if is_over(id) then
      word = 'ended'
    else
      note_claim_end(id, job[3], ENDS[cause])
      release(id, job[4], job[5], wid)
    end
  end
  words[#words + 1] = word
end
return words
