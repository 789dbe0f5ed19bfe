-- Needs pulse.lua. Whether a job that a worker had is between workers: its worker is lost, or gave it back,
-- and no other one has claimed it. After an outage ended leases mean nothing.
local is_outage = nil

local function is_between(state, owner, attempt)
  if not attempt or attempt == '0' then return false end
  if state == 'queued' then return true end
  if state ~= 'running' or redis.call('EXISTS', P .. 'w:' .. (owner or '')) == 1 then return false end
  if is_outage == nil then is_outage = leases_mean_nothing() end
  return not is_outage
end
