-- Make a delivered entry this worker's job: attempt + 1 is the fence every later write is checked by.
-- Returns {'OK', id, attempt, n, b, h, crashes, cached, request}, {'GONE'}, {'DONE', state} or
-- {'NEWER'} (written by a newer release: left untouched).
local function drop_entry(queue, entry)
  redis.call('XACK', queue, GROUP, entry)
  redis.call('XDEL', queue, entry)
end

local function claim(id, queue, entry, wid, blamed, max_crashes)
  local job_key = P .. 'job:' .. id
  local job = redis.call('HMGET', job_key, 'state', 'deadline_ms', 'n', 'qid', 'tenant',
    'prompt_tokens', 'fe', 'orphan_ms', 'og', 'v')
  local state = job[1]
  if not state or job[4] ~= entry then drop_entry(queue, entry); return {'GONE'} end
  if TERMINAL[state] then drop_entry(queue, entry); return {'DONE', state} end
  if tonumber(job[10] or '1') > SCHEMA_VERSION then return {'NEWER'} end
  if now_ms() >= tonumber(job[2]) then
    latch(id, {state = 'expired', reason = 'deadline_exceeded', by = wid})
    return {'DONE', 'expired'}
  end
  if orphaned(id, job[7], job[8], job[9]) then
    latch(id, {state = 'cancelled', reason = 'orphaned', by = wid})
    return {'DONE', 'cancelled'}
  end
  if blamed and blame(id, wid, max_crashes, job[3], 'worker_lost') then return {'DONE', 'failed'} end
  local request = redis.call('GET', P .. 'req:' .. id)
  if not request then
    latch(id, {state = 'failed', reason = 'payload_lost', by = wid})
    return {'DONE', 'failed'}
  end
  local attempt = redis.call('HINCRBY', job_key, 'attempt', 1)
  if state == 'queued' then
    count_job(job[5], job[6], 'running', 1)
    count_job(job[5], job[6], 'queued', -1)
  end
  local claimed_ms = whole(now_ms())
  redis.call('HSET', job_key, 'state', 'running', 'owner', wid, 'claim_ms', claimed_ms)
  redis.call('HSETNX', job_key, 'start_ms', claimed_ms)
  redis.call(PUBLISH, P .. 'ch:' .. id, 'S|' .. attempt .. '|' .. wid)
  local known = redis.call('HMGET', job_key, 'n', 'b', 'h', 'crashes', 'cached_tokens')
  return {'OK', id, tostring(attempt), known[1], known[2], known[3] or '', known[4] or '0',
    known[5] or '0', request}
end
