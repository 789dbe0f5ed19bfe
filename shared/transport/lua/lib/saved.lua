-- Needs lib/retention.lua. A row's job whose result is saved soon expires, unless it has a retain_ms.
local SAVED_JOB_MS = 60000

local function keep_saved(id)
  local job = read_job(id, 'state', 'retain_ms', unpack(KEPT_FIELDS))
  if job.state and not job.retain_ms and redis.call('PTTL', P .. 'job:' .. id) > SAVED_JOB_MS then
    keep_for(id, job, SAVED_JOB_MS, 'batch')
  end
end
