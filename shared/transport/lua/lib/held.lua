-- The bytes of Redis' memory that each tenant's jobs, batches, files and dead letters take, estimated by their
-- sizes. `held`: tenant -> bytes, of live and of ended jobs. `kept:<tenant>`: time -> the part of them that
-- has expired by then; `kept`: tenant -> the first of these times. `reap` subtracts expired bytes. Times are
-- the server's clock's, by which Redis expires keys.
local JOB_BYTES, ENDED_JOB_BYTES, TOKEN_BYTES = 3300, 5000, 34   -- docs/guides/operate/size.md, Memory
local BUCKETS = 16               -- per lifetime: kept bytes count at most a sixteenth of it too long
local RESERVED_BYTES = 1 / 10    -- of Redis' memory, for small jobs that keep nothing after their end
local SMALL_BYTES = 65536
local BRIEF_MS = 60000           -- how long a job of the reserve is kept after its end

local function hold(tenant, bytes, life_ms)
  if bytes == 0 then return end
  if redis.call('HINCRBY', P .. 'held', tenant, whole(bytes)) <= 0 then
    redis.call('HDEL', P .. 'held', tenant)
  elseif bytes > 0 then
    if life_ms then expire_at_least(P .. 'held', life_ms + LEFTOVER_MS) end
    redis.call('HINCRBY', P .. 'stat', 'store_grown', whole(bytes))
  end
end

-- Held bytes expire in `life_ms`. Returns the time by which they count as gone.
local function keep_held(tenant, bytes, life_ms)
  local width = math.max(1000, 2 ^ math.floor(math.log(life_ms / BUCKETS) / math.log(2)))
  local gone_ms = math.ceil((server_ms() + life_ms) / width) * width
  if bytes == 0 then return whole(gone_ms) end  -- as the log of a job without tokens
  -- Only for the first of these bytes: later ones expire at the same time.
  if redis.call('HINCRBY', P .. 'kept:' .. tenant, whole(gone_ms), whole(bytes)) == bytes then
    redis.call('ZADD', P .. 'kept', 'LT', whole(gone_ms), tenant)
    for _, key in ipairs({'kept:' .. tenant, 'kept', 'held'}) do
      expire_at_least(P .. key, life_ms + LEFTOVER_MS)
    end
  end
  return whole(gone_ms)
end

-- Before its time. Returns whether it was still counted.
local function unkeep(tenant, bytes, gone_ms)
  local kept = P .. 'kept:' .. tenant
  if not gone_ms or redis.call('HEXISTS', kept, gone_ms) == 0 then return false end
  if redis.call('HINCRBY', kept, gone_ms, whole(0 - bytes)) <= 0 then redis.call('HDEL', kept, gone_ms) end
  return true
end

local function release_held(tenant, bytes, gone_ms)
  if unkeep(tenant, bytes, gone_ms) then hold(tenant, 0 - bytes) end
end

-- Returns the new time, nil where it was not counted any more.
local function keep_held_for(tenant, bytes, gone_ms, life_ms)
  return unkeep(tenant, bytes, gone_ms) and keep_held(tenant, bytes, life_ms) or nil
end

-- Expired bytes, their times, and the first time of the rest (nil without one).
local function expired_of(tenant)
  local now, sum, times, first = server_ms(), 0, {}, nil
  local kept = redis.call('HGETALL', P .. 'kept:' .. tenant)
  for k = 1, #kept, 2 do
    local gone_ms = tonumber(kept[k])
    if gone_ms <= now then
      sum = sum + tonumber(kept[k + 1])
      times[#times + 1] = kept[k]
    else
      first = math.min(first or gone_ms, gone_ms)
    end
  end
  return sum, times, first
end

-- Reads only.
local function held_by(tenant)
  local held = tonumber(redis.call('HGET', P .. 'held', tenant) or '0')
  local first_ms = redis.call('ZSCORE', P .. 'kept', tenant)
  if first_ms and tonumber(first_ms) <= server_ms() then held = held - expired_of(tenant) end
  return math.max(held, 0)
end

-- Bytes of a job's log, by the fields of its hash: lp_bytes are those of log probabilities.
local function log_bytes_of(job)
  return tonumber(job.b or '0') + TOKEN_BYTES * tonumber(job.n or '0') + tonumber(job.lp_bytes or '0')
end

-- Returns nil if a tenant may have `bytes` more in Redis, else 'store' (Redis is nearly full) or
-- 'tenant_store'. A tenant has at most its share of the free bytes and its own. The reserve takes only small
-- jobs that keep nothing after their end, of tenants that do not hold more than its size.
-- `share`: '' none. `is_brief`: nothing of it outlives it for long.
local function refused_by_store(tenant, bytes, share, is_brief)
  local store = redis.call('HMGET', P .. 'stat', 'store_limit', 'store_used', 'store_grown')
  local limit = tonumber(store[1] or '0')
  if limit <= 0 then return nil, false end
  local reserve = limit * RESERVED_BYTES
  local left = limit - tonumber(store[2] or '0') - tonumber(store[3] or '0') - bytes
  local own, is_small = held_by(tenant), is_brief and bytes <= SMALL_BYTES
  local is_shared = share ~= ''
  if left < reserve then
    if is_shared and own > reserve then return 'tenant_store', true end
    return not is_small and 'store' or nil, true
  end
  if is_shared and own > 0 and not (is_small and own <= reserve)
    and own + bytes > tonumber(share) * (own + bytes + left) then
    return 'tenant_store', false
  end
  return nil, false
end
