-- A tenant's allowance for a minute, of requests and of tokens: a bucket of one minute's allowance that
-- fills up evenly. `limit:<tenant>` holds the used amount that is not refilled yet, in parts of a minute's
-- allowance: amount x 60000, so that a millisecond fills up exactly `per_minute` of them.
local MINUTE_MS = 60000

local function used_now(tenant, name, per_minute)
  local kept = redis.call('HMGET', P .. 'limit:' .. tenant, name, name .. '_ms')
  if not kept[1] then return 0 end
  local passed_ms = math.max(0, now_ms() - tonumber(kept[2]))
  return math.max(0, tonumber(kept[1]) - passed_ms * per_minute)
end

-- Milliseconds until `amount` more may be used; 0: now. A request larger than the whole bucket is admitted
-- when the bucket is full, and later requests wait.
local function allowed_in_ms(tenant, name, amount, per_minute)
  local used = used_now(tenant, name, per_minute)
  local over = used + (amount - per_minute) * MINUTE_MS
  return math.max(0, math.ceil(math.min(over, used) / per_minute))
end

-- An allowance as in replies: {name, per minute, amount left, ms until it is full again}.
local function reply_of(name, per_minute, used)
  local left = math.max(0, math.floor((per_minute * MINUTE_MS - used) / MINUTE_MS))
  return {name, whole(per_minute), whole(left), whole(math.ceil(used / per_minute))}
end

-- At admission; the caller has called `allowed_in_ms`. Returns the used amount, as `used_now`.
local function use(tenant, name, amount, per_minute)
  local key = P .. 'limit:' .. tenant
  local used = used_now(tenant, name, per_minute) + amount * MINUTE_MS
  redis.call('HSET', key, name, whole(used), name .. '_ms', whole(now_ms()))
  expire_at_least(key, math.ceil(used / per_minute) + 1000)
  return used
end

-- Later: corrects the amount used at admission, up or down.
local function spend(tenant, name, amount)
  local key = P .. 'limit:' .. tenant
  if redis.call('HEXISTS', key, name) == 1 then
    redis.call('HINCRBY', key, name, whole(amount * MINUTE_MS))
  end
end
