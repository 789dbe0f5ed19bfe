-- A job's readers, and whether all of them have left.
local TAKEOVER_MS = 4000     -- how long readers elsewhere have to take over the mark of a dead frontend
local STANDSTILL_MS = 20000  -- how long, beyond its lease, a stopped frontend may resume

local function frontend_of(reader)
  return string.match(reader or '', '^[^#]+')
end

-- Whether the reader's frontend may be alive: its lease runs, or leases mean nothing now.
local function is_alive(reader)
  local frontend = frontend_of(reader)
  if not frontend then return false end
  local lease = P .. 'f:' .. frontend
  local given_ms = tonumber(redis.call('GET', lease) or '0')
  -- An older release writes 1.
  return lease_runs(lease, given_ms > 1 and given_ms or nil) or leases_mean_nothing()
end

-- Whether any process is subscribed to the job's channel. The system closes the connections of a
-- process that dies; those of one that is stopped, paused or in a long computation stay.
local function has_listener(id)
  local numsub = PUBLISH == 'SPUBLISH' and 'SHARDNUMSUB' or 'NUMSUB'
  local found = redis.pcall('PUBSUB', numsub, P .. 'ch:' .. id)
  return not found.err and tonumber(found[2]) > 0
end

-- Returns true when the job has no reader any more and its grace has passed. `og` is the policy: '' never
-- cancels it, else the grace in ms ('0': only for readers at other frontends). A frontend whose
-- lease ended starts the clock; the first look decides whether it has died or may still wake.
local function orphaned(id, reader, orphan_ms, grace_ms)
  if not grace_ms or grace_ms == '' then return false end
  if orphan_ms and orphan_ms ~= '' then return now_ms() >= tonumber(orphan_ms) end
  if not frontend_of(reader) or is_alive(reader) then return false end
  local due = due_in(math.max(tonumber(grace_ms), has_listener(id) and STANDSTILL_MS or TAKEOVER_MS))
  redis.call('HSET', P .. 'job:' .. id, 'orphan_ms', whole(due))
  return false
end
