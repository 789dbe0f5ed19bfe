-- renew: restarts the retention of ended jobs that have their own.
-- ARGV: 3... ids
-- Returns how many. Idempotent.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
local renewed = 0
for i = 3, #ARGV do
  local id = ARGV[i]
  local job = read_job(id, 'state', 'retain_ms', unpack(KEPT_FIELDS))
  if TERMINAL[job.state] and job.retain_ms then
    keep_for(id, job, tonumber(job.retain_ms), 'request')
    renewed = renewed + 1
  end
end
return renewed
