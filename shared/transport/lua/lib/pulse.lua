-- Leases end by the clock, also while Redis itself is unavailable. When it comes back, all of them have
-- ended at once and no process has died: for a moment an ended lease then means nothing.
--
-- A silence looks like a clock that was set forward: the server's clock has moved without a call.
-- Time then stands still (`stands_ms`) until a caller testifies what passed between two of its calls,
-- one before the silence and one after it. What the clock was set by becomes `skew_ms`.
--
-- A call's number does not show whether it was before the silence: a server that lost its last writes counts
-- some numbers twice. `epoch` names the period in which nothing was added to `skew_ms`. A caller keeps
-- the epoch of its first call, which it made while time did not stand still. One of an earlier epoch would
-- count a known step again, and is refused.
local RETURN_MS = 5000       -- how long every process has to send a heartbeat again
local STAND_MS = 10000       -- without testimony (all callers are new): time has passed
local PULSE_LIFE_MS = 604800000

-- Called by scripts that run at least once a second while anything runs. The first write is never
-- refused above maxmemory.
-- `testimony`: '' or '<epoch>:<number>:<ms>', the epoch of a pulse, the number of a later one, and what
-- the clock was set by between them.
-- Returns this call's number, the server's clock, 1 while time stands still, else 0, and the epoch.
local function pulse(testimony)
  local key, server = P .. 'pulse', server_ms()
  redis.call('PEXPIRE', key, PULSE_LIFE_MS)
  local kept = redis.call('HMGET', key, 'at_ms', 'skew_ms', 'stands_ms', 'back_ms', 'back_n', 'epoch')
  local number = redis.call('HINCRBY', key, 'n', 1)
  local stands, epoch = kept[3], kept[6]
  if kept[1] and math.abs(server - tonumber(kept[1])) > SILENCE_MS then
    redis.call('HSET', key, 'back_ms', whole(server), 'back_n', number)
    if not stands then
      stands = whole(tonumber(kept[1]) - tonumber(kept[2] or '0'))
      redis.call('HSET', key, 'stands_ms', stands)
    end
  elseif stands then
    local first, last, step = string.match(testimony or '', '^([^:]+):(%d+):(%-?%d+)$')
    local is_known = first and first == epoch
      and tonumber(last) >= tonumber(kept[5]) and tonumber(last) < number
    if is_known and step ~= '0' then redis.call('HINCRBY', key, 'skew_ms', step) end
    if is_known or server - tonumber(kept[4]) > STAND_MS then
      redis.call('HDEL', key, 'stands_ms')
      stands = false
      -- An outage without a step changes nothing: what callers know of before it is still good.
      if not is_known or step ~= '0' then epoch = nil end
    end
  end
  epoch = epoch or number .. '-' .. whole(server)
  redis.call('HSET', key, 'at_ms', whole(server), 'epoch', epoch)
  redis.call('PEXPIRE', key, PULSE_LIFE_MS)
  clock = nil
  return {number, whole(server), stands and 1 or 0, epoch}
end

local function leases_mean_nothing()
  local server, seen = server_ms(), redis.call('HMGET', P .. 'pulse', 'at_ms', 'back_ms')
  return (seen[1] and math.abs(server - tonumber(seen[1])) > SILENCE_MS)
    or (seen[2] and server - tonumber(seen[2]) < RETURN_MS) or false
end

-- Whether a lease granted for `given_ms` (nil: unknown) runs. After the server's clock was set back it
-- would run longer: it is cut.
local function lease_runs(key, given_ms)
  local left_ms = redis.call('PTTL', key)
  if given_ms and left_ms > given_ms then redis.call('PEXPIRE', key, whole(given_ms)) end
  return left_ms ~= -2
end
