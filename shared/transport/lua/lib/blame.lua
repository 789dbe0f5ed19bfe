-- Blame a job for the death of the process that ran it. Ends the job, with a dead letter, and returns
-- true when it was the last death too many.
local MAX_DEATHS = 10       -- in a job's whole life, also when it made progress in between

local function blame(id, wid, max_crashes, lost_reason)
  local job_key = P .. 'job:' .. id
  local crashes = redis.call('HINCRBY', job_key, 'crashes', 1)
  local deaths = redis.call('HINCRBY', job_key, 'deaths', 1)
  local reason, count = 'poison', crashes
  if crashes < max_crashes then
    if deaths < MAX_DEATHS then return false end
    reason, count = lost_reason, deaths
  end
  write_letter(id, reason, count)
  latch(id, {state = 'failed', reason = reason, by = wid})
  return true
end
