-- Leases end by the clock, also while the store itself is away. When it comes back, all of them have
-- ended at once and nobody has died: for a moment an ended lease then means nothing.
local SILENCE_MS = 2000      -- without a beat or a reap by anybody: the store was away
local RETURN_MS = 5000       -- what everybody has to beat again
local PULSE_LIFE_MS = 3600000

-- Called by what is called at least once a second while anything runs. The first write is one that
-- is never refused above maxmemory.
local function pulse()
  local key, now = P .. 'pulse', now_ms()
  redis.call('PEXPIRE', key, PULSE_LIFE_MS)
  local last = redis.call('HGET', key, 'at_ms')
  if last and now - tonumber(last) > SILENCE_MS then redis.call('HSET', key, 'back_ms', whole(now)) end
  redis.call('HSET', key, 'at_ms', whole(now))
  redis.call('PEXPIRE', key, PULSE_LIFE_MS)
end

local function leases_mean_nothing()
  local now, seen = now_ms(), redis.call('HMGET', P .. 'pulse', 'at_ms', 'back_ms')
  return (seen[1] and now - tonumber(seen[1]) > SILENCE_MS)
    or (seen[2] and now - tonumber(seen[2]) < RETURN_MS) or false
end
