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
  write_dead_letter(id, reason, count)
  latch(id, {state = 'failed', reason = reason, by = wid})
  return true
end

-- Note that an engine which hung was killed with this job in it. It is a suspect at once: everybody
-- waited for as long as the stall limit. `is_named`: it was tried as the one suspect, and one that hung
-- an engine before ends with a dead letter then. Returns true when the job ended.
local function note_stall(id, wid, max_crashes, is_named)
  local job_key = P .. 'job:' .. id
  local stalls = redis.call('HINCRBY', job_key, 'stalls', 1)
  local least = is_named and stalls > 1 and max_crashes - 1 or 1
  local crashes = tonumber(redis.call('HGET', job_key, 'crashes') or '0')
  redis.call('HSET', job_key, 'crashes', math.max(crashes, least))
  return blame(id, wid, max_crashes, 'engine_died')
end

-- Note that a device failed while this job was on it. It costs the job nothing, and from the second
-- time without a token in between makes it a suspect. `at_fault`: it was tried as the one suspect on a
-- device that had worked for others, which counts as a crash after two others. Returns true when
-- that ended the job, or when devices failed under it MAX_DEATHS times without a token in between.
local function note_loss(id, wid, max_crashes, at_fault)
  local job_key = P .. 'job:' .. id
  local losses = redis.call('HINCRBY', job_key, 'losses', 1)
  if at_fault then
    local crashes = tonumber(redis.call('HGET', job_key, 'crashes') or '0')
    redis.call('HSET', job_key, 'crashes', math.max(crashes, 2))
    return blame(id, wid, max_crashes, 'engine_died')
  end
  if losses < MAX_DEATHS then return false end
  write_dead_letter(id, 'engine_died', losses)
  latch(id, {state = 'failed', reason = 'engine_died', by = wid})
  return true
end
