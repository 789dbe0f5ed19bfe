-- Needs lib/held.lua. A batch's states: validating, in_progress, finalizing, completed; failed from validating; cancelling
-- before cancelled; expired. One frontend at a time runs it, under a lease; `fence` counts the leases,
-- and a call with an older one is refused.
-- Bytes of a record without labels, and of the errors that it may end with: an open batch counts as if it had
-- all of them.
local BATCH_BYTES, BATCH_ERRORS_BYTES = 2000, 40960
local BATCH_OVER = {completed = true, failed = true, expired = true, cancelled = true}

local function set_status(key, status)
  redis.call('HSET', key, 'status', status, status .. '_ms', whole(now_ms()))
end

-- Counts `bytes` more for the record of a batch, which expires in `life_ms`.
local function keep_batch(id, bytes, life_ms)
  local key = P .. 'batch:' .. id
  local batch = redis.call('HMGET', key, 'tenant', 'held', 'kept_until_ms')
  if not batch[2] then return end  -- of an older release
  hold(batch[1], bytes)
  local gone_ms = unkeep(batch[1], tonumber(batch[2]), batch[3])
    and keep_held(batch[1], tonumber(batch[2]) + bytes, life_ms)
  if gone_ms then redis.call('HSET', key, 'held', whole(tonumber(batch[2]) + bytes), 'kept_until_ms', gone_ms) end
end

local function drop_batch(id)
  local batch = redis.call('HMGET', P .. 'batch:' .. id, 'tenant', 'held', 'kept_until_ms')
  redis.call('DEL', P .. 'batch:' .. id)
  if not batch[1] then return end
  redis.call('ZREM', P .. 'batches:' .. batch[1], id)
  if batch[2] then release_held(batch[1], tonumber(batch[2]), batch[3]) end
end

-- The caller has checked that the batch exists and has not ended.
local function end_batch(id, status)
  local key = P .. 'batch:' .. id
  redis.call('ZREM', P .. 'batches_open', id)
  local batch = redis.call('HMGET', key, 'input', 'keep_ms', 'errors')
  set_status(key, status)
  redis.call('HSET', key, 'owner', '', 'lease_ms', 0)
  redis.call('PEXPIRE', key, batch[2])
  keep_batch(id, #(batch[3] or '') - BATCH_ERRORS_BYTES, tonumber(batch[2]))
  if redis.call('EXISTS', P .. 'file:' .. batch[1]) == 1 then
    redis.call('HINCRBY', P .. 'file:' .. batch[1], 'uses', -1)
  end
end
