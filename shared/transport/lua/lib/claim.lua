-- Make a delivered entry this worker's job: attempt + 1 is the fence every later write is checked by.
-- Returns {'OK', id, attempt, n, b, h, crashes, cached, request, facts, fields of its hash, owner and
-- time of the claim before, from which the job was not given back ('' else), times of the first and the
-- last delta of that claim ('' without)}, {'GONE'}, {'DONE', state},
-- {'NEWER'} (written by a newer release) or {'WAITS'} (a plain job whose frontend has died does not start
-- before a reader elsewhere has taken the mark over): left untouched; the caller gives it back.
-- {'OTHER'}: another model's files are needed (served_by.lua); the job was set aside, or has ended.
-- `is_new`: the entry has just been delivered for the first time. A job that runs then was restored by
-- its owner (restore.lua), or claimed ahead of its turn (lib/affinity.lua): {'HELD', owner}, left untouched
-- too. One that was in a crash since is given back: only recover may take it.
-- `placed`: why this worker gets it; 'prefix': its cache holds the job's prefix; 'late': another's does, which has
-- not taken it in time; without: 'any' does.
-- Its worker needs facts and fields to restore the job if Redis loses it.
local function drop_entry(queue, entry)
  redis.call('XACK', queue, GROUP, entry)
  redis.call('XDEL', queue, entry)
end

local function claim(id, queue, entry, wid, blamed, max_crashes, is_new, placed)
  local job_key = P .. 'job:' .. id
  local job, flat = {}, redis.call('HGETALL', job_key)
  for k = 1, #flat, 2 do job[flat[k]] = flat[k + 1] end
  local state = job.state
  if not state or job.qid ~= entry then drop_entry(queue, entry); return {'GONE'} end
  if TERMINAL[state] then drop_entry(queue, entry); return {'DONE', state} end
  if tonumber(job.v or '1') > SCHEMA_VERSION then return {'NEWER'} end
  if is_new and state == 'running' then return {'HELD', job.owner} end
  if is_new and ((job.crashes or '0') ~= '0' or (job.losses or '0') ~= '0') then return {'WAITS'} end
  if now_ms() >= tonumber(job.deadline_ms) then
    latch(id, {state = 'expired', reason = 'deadline_exceeded', by = wid})
    return {'DONE', 'expired'}
  end
  -- For a job without an earlier claim; one that was restored has only its deadline.
  local queue_deadline_ms = job.attempt == '0' and tonumber(job.queue_deadline_ms)
  if queue_deadline_ms and now_ms() >= queue_deadline_ms then
    latch(id, {state = 'expired', reason = 'queue_timeout', by = wid})
    return {'DONE', 'expired'}
  end
  if orphaned(id, job.fe, job.orphan_ms, job.og) then
    latch(id, {state = 'cancelled', reason = 'orphaned', by = wid})
    return {'DONE', 'cancelled'}
  end
  if state == 'queued' and job.og == '0' and redis.call('HEXISTS', job_key, 'orphan_ms') == 1 then
    return {'WAITS'}
  end
  if state == 'running' and job.owner ~= wid then note_claim_end(id, job.attempt, 'worker_lost') end
  if blamed then
    if blame(id, wid, max_crashes, 'worker_lost') then return {'DONE', 'failed'} end
    local counts = redis.call('HMGET', job_key, 'crashes', 'deaths')
    job.crashes, job.deaths = counts[1], counts[2]
  end
  local need = needs(job)
  if not fits(wid, need) then
    set_aside(id, queue, entry, wid, state, need)
    return {'OTHER'}
  end
  local request = redis.call('GET', P .. 'req:' .. id)
  if not request then
    latch(id, {state = 'failed', reason = 'payload_lost', by = wid})
    return {'DONE', 'failed'}
  end
  local attempt, claimed_ms = whole(tonumber(job.attempt or '0') + 1), whole(now_ms())
  local claims = with_claim(job.claims, attempt, job.n, job.deaths, wid)
  redis.call('HSET', job_key, 'state', 'running', 'attempt', attempt, 'owner', wid,
    'claim_ms', claimed_ms, 'start_ms', job.start_ms or claimed_ms, 'claims', claims,
    'placed', placed or 'any')
  if job.last_ms then redis.call('HDEL', job_key, 'out_ms', 'last_ms') end
  if job.n == '0' and not job.ps then  -- the first output will be this worker's
    local weights = weights_at(wid, job.model)
    if weights ~= (job.weights_digest or '') then redis.call('HSET', job_key, 'weights_digest', weights) end
  end
  redis.call(PUBLISH, P .. 'ch:' .. id, 'S|' .. attempt .. '|' .. wid)
  if queue_deadline_ms then redis.call('ZREM', P .. 'unbegun', id) end
  if state == 'queued' then count_job(id, 'queued', 'running', job) end
  local fields = redis.call('HGETALL', job_key)
  if job.idem then
    fields[#fields + 1] = 'idem_body'
    fields[#fields + 1] = redis.call('HGET', P .. 'idem:' .. job.idem, 'body') or ''
  end
  return {'OK', id, attempt, job.n, job.b, job.h or '', job.crashes or '0', job.cached_tokens or '0',
    request, stored_request(id) or '', fields,
    job.owner or '', job.claim_ms or '', job.out_ms or '', job.last_ms or ''}
end
