-- Needs lib/parts.lua. The only way to a terminal state. The caller has checked that the job exists and has not ended.
-- `ending` has state, reason, by; optionally message, stop_reason (JSON), cached (tokens).
-- Freeing writes go first: above maxmemory a script may run deny-oom commands only once it has written.
local ENDED_INDEX_MAX = 1000
local MEAN_OVER = 32   -- jobs that the mean of the outputs is moved by

local MESSAGES = {
  deadline_exceeded = 'The deadline passed before the job was finished.',
  queue_timeout = 'No worker started the job within its queue timeout.',
  orphaned = 'The job had no reader left.',
  disconnected = 'The client disconnected.',
  cancelled = 'The job was cancelled.',
  poison = 'Workers died repeatedly while running this job.',
  engine_died = 'The engine died repeatedly while running this job.',
  worker_lost = 'Too many workers died while running this job.',
  payload_lost = 'The request of this job is no longer stored.',
  model_replaced = 'The model was replaced while the job waited, and no worker serves the old one. '
    .. 'Send the request again.',
}

-- Prompts of ended jobs, for people who ask why a later prompt was not cached. Nothing depends on
-- them. The score of an entry in `prompts` is the bytes stored up to and with it.
-- A rename: the request is not copied on the way to the end.
local PROMPTS_MAX, PROMPTS_MAX_BYTES = 256, 33554432

local function keep_prompt(id)
  local request, prompts = P .. 'req:' .. id, P .. 'prompts'
  local bytes = redis.call('STRLEN', request)
  if bytes == 0 or bytes * 4 > PROMPTS_MAX_BYTES then
    redis.call('DEL', request)
    return
  end
  redis.call('RENAME', request, P .. 'prompt:' .. id)
  redis.call('PEXPIRE', P .. 'prompt:' .. id, RETAIN_MS)
  local sum = bytes + tonumber(redis.call('ZRANGE', prompts, -1, -1, 'WITHSCORES')[2] or '0')
  local count = redis.call('ZCARD', prompts) + 1
  while count > 1 do
    local oldest = redis.call('ZRANGE', prompts, 0, 0, 'WITHSCORES')
    if count <= PROMPTS_MAX and sum - tonumber(oldest[2]) < PROMPTS_MAX_BYTES then break end
    redis.call('DEL', P .. 'prompt:' .. oldest[1])
    redis.call('ZREM', prompts, oldest[1])
    count = count - 1
  end
  redis.call('ZADD', prompts, whole(sum), id)
  redis.call('PEXPIRE', prompts, RETAIN_MS)
end

-- The job's log has its true size now, and with its record it is kept for so long.
local function keep_ended_job(id, job, retain_ms)
  if not job.held then return end  -- of an older release
  local bytes = ENDED_JOB_BYTES + redis.call('STRLEN', P .. 'facts:' .. id) + log_bytes_of(job)
  hold(job.tenant, bytes - tonumber(job.held) - tonumber(job.held_log or '0'))
  redis.call('HSET', P .. 'job:' .. id, 'held', whole(bytes), 'held_log', 0,
    'kept_until_ms', keep_held(job.tenant, bytes, tonumber(retain_ms)))
end

-- Corrects the work that was expected of the job and reserved for it by its real work.
local function settle(job, ending_state)
  if job.reserved then
    local used = job.attempt == '0' and 0 or tonumber(job.prompt_tokens) + tonumber(job.n)
    spend(job.tenant, 'tokens', used - tonumber(job.reserved))
  end
  if ending_state == 'finished' then
    local work_key = P .. 'work:' .. job.model
    local each = math.floor(tonumber(job.n) * 1000 / tonumber(job.choices or '1'))
    local mean = tonumber(redis.call('HGET', work_key, 'output') or each)
    redis.call('HSET', work_key, 'output', whole(mean + math.floor((each - mean) / MEAN_OVER)))
    expire_at_least(work_key, WORK_LIFE_MS)
  end
end

local function latch(id, ending)
  local job_key, log_key = P .. 'job:' .. id, P .. 'log:' .. id
  local job = read_job(id, 'state', 'n', 'b', 'q', 'qid', 'owner', 'prompt_tokens', 'cached_tokens',
    'retain_ms', 'tenant', 'reserved', 'attempt', 'model', 'choices', 'idem',
    'queue_deadline_ms', 'held', 'held_log', 'lp_bytes', 'brief')
  job.n, job.prompt_tokens = job.n or '0', job.prompt_tokens or '0'
  local old, n, b, queue, entry = job.state, job.n, job.b or '0', job.q, job.qid
  local owner, prompt, cached = job.owner or '', job.prompt_tokens, ending.cached or job.cached_tokens or '0'
  local retain_ms = job.retain_ms or (job.brief and math.min(BRIEF_MS, RETAIN_MS)) or RETAIN_MS
  local message = ending.message
  if not message or message == '' then message = MESSAGES[ending.reason] or '' end
  local stop_reason = ending.stop_reason or ''
  redis.call('ZREM', P .. 'live', id)
  if job.queue_deadline_ms then redis.call('ZREM', P .. 'unbegun', id) end
  keep_prompt(id)
  if queue and entry then
    redis.call('XACK', queue, GROUP, entry)
    redis.call('XDEL', queue, entry)
  end
  if owner ~= '' and redis.call('GET', P .. 'probe:' .. owner) == id then
    redis.call('DEL', P .. 'probe:' .. owner)
  end
  local ended_ms = now_ms()
  redis.call('HSET', job_key, 'state', ending.state, 'reason', ending.reason, 'by', ending.by,
    'message', message, 'stop_reason', stop_reason, 'cached_tokens', cached, 'end_ms', whole(ended_ms))
  count_job(id, old, nil)
  settle(job, ending.state)
  redis.call('HINCRBY', P .. 'stat', ending.state .. '_total', 1)
  -- pcall: a log that refuses its last entry must not leave the job half ended; readers of such a
  -- log find the end in the hash.
  redis.pcall('XADD', log_key, whole(tonumber(n) + 1) .. '-0', 'k', 'end', 'n', n, 'b', b,
    'state', ending.state, 'reason', ending.reason, 'stop_reason', stop_reason, 'message', message,
    'prompt_tokens', prompt, 'cached_tokens', cached, 'end_ms', whole(ended_ms))
  redis.call('PEXPIRE', log_key, retain_ms)
  redis.call('PEXPIRE', job_key, retain_ms)
  redis.call('PEXPIRE', P .. 'facts:' .. id, retain_ms)
  local index = index_of(id)
  if index then keep_parts(job.tenant, index, tonumber(retain_ms)) end
  if job.idem then redis.call('PEXPIRE', P .. 'idem:' .. job.idem, retain_ms) end
  keep_ended_job(id, job, retain_ms)
  bury_record(id, retain_ms)
  -- By state, and by tenant: a tenant without ended jobs reads none of the others'.
  for _, of in ipairs({ending.state, 'tenant:' .. (job.tenant or '')}) do
    local index = P .. 'ended:' .. of
    redis.call('ZADD', index, whole(ended_ms), id)
    redis.call('ZREMRANGEBYSCORE', index, '-inf', '(' .. whole(ended_ms - RETAIN_MS))
    redis.call('ZREMRANGEBYRANK', index, 0, -(ENDED_INDEX_MAX + 1))
    redis.call('PEXPIRE', index, RETAIN_MS)
  end
  -- A finished job has no message: its frame ends with the time.
  local last = ending.state == 'finished' and whole(ended_ms) or message
  redis.call(PUBLISH, P .. 'ch:' .. id, table.concat(
    {'E', n, ending.state, ending.reason, b, prompt, cached, stop_reason, last}, '|'))
  if old == 'running' and owner ~= '' and ending.by ~= owner then
    redis.call(PUBLISH, P .. 'ctl:' .. owner, id)
  end
  return {'OK', ending.state, n}
end
