-- A batch's states: validating, in_progress, finalizing, completed; failed from validating; cancelling
-- before cancelled; expired. One frontend at a time runs it, under a lease; `fence` counts the leases,
-- and a call with an older one is refused.
local BATCH_OVER = {completed = true, failed = true, expired = true, cancelled = true}

local function set_status(key, status)
  redis.call('HSET', key, 'status', status, status .. '_ms', whole(now_ms()))
end

-- The caller has checked that the batch exists and has not ended.
local function end_batch(id, status)
  local key = P .. 'batch:' .. id
  redis.call('ZREM', P .. 'batches_open', id)
  local batch = redis.call('HMGET', key, 'input', 'keep_ms')
  set_status(key, status)
  redis.call('HSET', key, 'owner', '', 'lease_ms', 0)
  redis.call('PEXPIRE', key, batch[2])
  if redis.call('EXISTS', P .. 'file:' .. batch[1]) == 1 then
    redis.call('HINCRBY', P .. 'file:' .. batch[1], 'uses', -1)
  end
end
