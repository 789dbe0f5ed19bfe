-- True when nobody reads the job any more and its grace has passed. `og` is the policy: '' keeps the
-- job for ever, else the grace in ms ('0': none). A frontend whose lease ended starts the clock.
local function frontend_of(reader)
  return string.match(reader or '', '^[^#]+')
end

local function orphaned(id, reader, orphan_ms, grace_ms)
  if not grace_ms or grace_ms == '' then return false end
  local now = now_ms()
  if orphan_ms and orphan_ms ~= '' then return now >= tonumber(orphan_ms) end
  local frontend = frontend_of(reader)
  if not frontend or redis.call('EXISTS', P .. 'f:' .. frontend) == 1 then return false end
  if leases_mean_nothing() then return false end
  local due = now + tonumber(grace_ms)
  if due <= now then return true end
  redis.call('HSET', P .. 'job:' .. id, 'orphan_ms', whole(due))
  return false
end
