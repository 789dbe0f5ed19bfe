-- submit: admits one job, or refuses it before anything is written.
-- ARGV: names and values from 3 on. The job's: id, model, lane (priority: the first it may get),
--   tenant, kind, request, timeout_ms, queue_timeout_ms ('' as timeout_ms: until its first claim),
--   prompt_tokens, max_output (tokens of all choices), choices ('' one), crid, sampling (JSON, shown with
--   the record), facts ('' none; lib/parts.lua), part:<digest> (of each part of the facts), retain_ms (how long
--   it is kept after its end; '' as all others: its record record_ms, its text text_ms, which is the request's
--   own wish where own_text is '1').
--   Its reader: reader ('' none), grace (policy), frontend_lease_ms.
--   Limits of all: max_queued, max_queued_tokens; the tenant's ('' none): max_tenant_share, max_store_share,
--   max_tenant_queued, max_tenant_queued_tokens, max_tenant_jobs, requests_per_minute,
--   tokens_per_minute.
--   token_bytes: of a token of the output in the log.
--   tok_s: tokens computed in a second while work waits, prompts and outputs ('' unknown).
--   idem, idem_body: digests of the idempotency key and of the body ('' none).
--   prompt_digest: of the model card that the prompt was prepared with ('' unknown).
--   prefixes: digests of the prompt's prefixes (lib/affinity.lua; '' none), for a choice between workers.
--   letter: the dead letter that it replaces ('' none).
--   again: '1' for a job that was accepted before and that the server has lost: no limit holds for it.
-- Returns {'OK', entry, left}; {'DUP', state, left}; {'FULL', scope, tokens of work that wait, ms until
--   it may fit or '', left}, `left`: the tenant's allowances after this job, as reply_of gives them;
--   for an idempotency key also {'SAME', id} (that job has it) and {'REUSED', id} (with another
--   body); for a dead letter also {'REQUEUED', id} (it was taken before, by that job) and {'NODEADLETTER'};
--   with `again` also {'OVER'}: the job has ended, and its record was removed.
-- Idempotent: the same id again (after a lost reply) answers DUP and changes nothing.
-- XADD is the first write, so above maxmemory the whole submit is refused.
--@include lib/common.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
--@include lib/allowance.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
--@include lib/dead_letter.lua
local LAST_LANE, UNKNOWN_OUTPUT = 7, 256
local params = {}
for i = 3, #ARGV, 2 do params[ARGV[i]] = ARGV[i + 1] end
local id, model, tenant, reader = params.id, params.model, params.tenant, params.reader
local prompt_tokens, timeout_ms = tonumber(params.prompt_tokens), tonumber(params.timeout_ms)
-- A queue timeout that is not shorter than the deadline can never pass first: it is dropped.
local queue_timeout_ms = tonumber(params.queue_timeout_ms)
if queue_timeout_ms and queue_timeout_ms >= timeout_ms then queue_timeout_ms = nil end
local reserved = prompt_tokens + tonumber(params.max_output)
local base, num_choices = tonumber(params.lane), tonumber(params.choices ~= '' and params.choices or '1')
local job_key, tenant_key, work_key = P .. 'job:' .. id, P .. 'tenant:' .. tenant, P .. 'work:' .. model

local rates = {}  -- name, amount, per minute
if params.requests_per_minute ~= '' then
  rates[#rates + 1] = {'requests', 1, tonumber(params.requests_per_minute)}
end
if params.tokens_per_minute ~= '' then
  rates[#rates + 1] = {'tokens', reserved, tonumber(params.tokens_per_minute)}
end

-- For a refused submit, which uses nothing.
local function allowances_left()
  local left = {}
  for k, rate in ipairs(rates) do
    left[k] = reply_of(rate[1], rate[3], used_now(tenant, rate[1], rate[3]))
  end
  return left
end

-- Returns nil, or the reply to a repeat or to a dead letter that is missing.
local function known_before()
  local state = redis.call('HGET', job_key, 'state')
  if state then return {'DUP', state, allowances_left()} end
  if params.idem ~= '' then
    local kept = redis.call('HMGET', P .. 'idem:' .. params.idem, 'id', 'body')
    local kept_state = kept[1] and redis.call('HGET', P .. 'job:' .. kept[1], 'state')
    -- What failed may be tried again, as a new job.
    if kept_state == 'finished' or (kept_state and not TERMINAL[kept_state]) then
      return {kept[2] == params.idem_body and 'SAME' or 'REUSED', kept[1]}
    end
  end
  if params.dead_letter ~= '' then
    local dead_letter = redis.call('HMGET', P .. 'dead:' .. params.dead_letter, 'entry', 'requeued_as')
    if dead_letter[2] then return {'REQUEUED', dead_letter[2]} end
    if not dead_letter[1] then return {'NODEADLETTER'} end
  end
  return nil
end

local answer = known_before()
if answer then return answer end
local is_again = params.again == '1'
if is_again and redis.call('EXISTS', P .. 'tombstone:' .. id) == 1 then return {'OVER'} end

-- The fields of a hash as numbers, and the last one unchanged.
local function numbers(key, ...)
  local found, kept = {}, redis.call('HMGET', key, ...)
  for k, value in ipairs(kept) do found[k] = tonumber(value or '0') end
  return found, kept[#kept]
end

local stat = numbers(P .. 'stat', 'queued', 'queued_tokens')
local of_tenant = {'queued', 'running', 'queued_tokens', 'newest' .. base}
for lane = 0, base do of_tenant[#of_tenant + 1] = 'base' .. lane end
local mine = numbers(tenant_key, unpack(of_tenant))
local work, mean = numbers(work_key, '0', '1', '2', '3', '4', '5', '6', '7', 'output')

-- The number of the tenant's own jobs before this one, without those of a later priority.
local function depth()
  local sum = 0
  for k = 5, #mine do sum = sum + mine[k] end
  return sum, mine[#mine]
end

-- A tenant with few waiting jobs precedes one with many: a lane for each doubling. The jobs of a tenant
-- that is alone in the queue stay in their order, and none gets a lane before that of its newest.
local function lane_of()
  local before, of_this_base = depth()
  local lane = 0
  while lane < LAST_LANE and 2 ^ (lane + 1) <= 1 + before do lane = lane + 1 end
  if of_this_base > 0 and mine[1] == stat[1] then lane = math.max(lane, mine[4]) end
  return math.max(base, lane)
end

local lane = lane_of()
local ahead = 0
for k = 0, lane do ahead = ahead + work[k + 1] end
local expected = mean and math.ceil(tonumber(mean) / 1000) or UNKNOWN_OUTPUT
local own_work = prompt_tokens + math.min(tonumber(params.max_output), expected * num_choices)

local function full(scope, ms)
  return {'FULL', scope, whole(ahead + own_work), ms and whole(ms) or '', allowances_left()}
end

local function over(limit, amount) return limit ~= '' and not is_again and amount > tonumber(limit) end

-- Whether a tenant would have more waiting than its share of the free amount and its own. The more
-- tenants fill the queue, the smaller the share of each. The last tenth is reserved for tenants with
-- nothing or little waiting. `amount` is the job's.
local RESERVED, LITTLE = 1 / 10, 1 / 200   -- of the limit
local function over_share(limit, all, own, amount)
  if is_again or params.max_tenant_share == '' or own <= 0 or own + amount <= limit * LITTLE then
    return false
  end
  local left = limit - all - amount
  return left < math.floor(limit * RESERVED)
    or own + amount > tonumber(params.max_tenant_share) * (own + amount + left)
end

-- A tenant's own bounds first: one that has filled its share learns that, not that the queue is full.
if over_share(tonumber(params.max_queued), stat[1], mine[1], 1) then return full('tenant') end
if over_share(tonumber(params.max_queued_tokens), stat[2], mine[3], prompt_tokens) then
  return full('tenant_tokens')
end
if over(params.max_queued, stat[1] + 1) then return full('total') end
if over(params.max_queued_tokens, stat[2] + prompt_tokens) then return full('tokens') end
if over(params.max_tenant_queued, mine[1] + 1) then return full('tenant') end
if over(params.max_tenant_queued_tokens, mine[3] + prompt_tokens) then return full('tenant_tokens') end
if over(params.max_tenant_jobs, mine[1] + mine[2] + 1) then return full('tenant_jobs') end
-- Refused now, not after a wait that must fail.
if params.tok_s ~= '' and not is_again and (ahead + own_work) * 1000 > tonumber(params.tok_s) * timeout_ms then
  return full('deadline')
end
if queue_timeout_ms and params.tok_s ~= '' and not is_again and ahead * 1000 > tonumber(params.tok_s) * queue_timeout_ms then
  return full('queue_timeout')
end
local fixed_bytes = JOB_BYTES + #params.request + #params.facts
local index = string.sub(params.facts, 1, 1) == '#' and params.facts or nil
local log_bytes = math.min(tonumber(params.max_output), expected * num_choices) * tonumber(params.token_bytes)
  + tonumber(params.vector_bytes)
for _, rate in ipairs(rates) do
  local ms = allowed_in_ms(tenant, rate[1], rate[2], rate[3])
  if ms > 0 then return full(rate[1] .. '_per_minute', ms) end
end
local is_in_reserve = false
-- The last check: it may evict, for this job alone. A job that is refused all the same is nearer to its room
-- with each try.
if not is_again then
  local why
  local needed, is_brief = fixed_bytes + log_bytes, params.retain_ms == ''
  if index then needed = needed + new_part_bytes(index, params) end
  why, is_in_reserve = refused_by_store(tenant, needed, params.max_store_share, is_brief)
  if (why or is_in_reserve) and evict_for(tenant, needed, why) then
    why, is_in_reserve = refused_by_store(tenant, needed, params.max_store_share, is_brief)
  end
  if why then return full(why) end
end

local now = now_ms()
local queue = P .. 'q:' .. model .. ':' .. lane
local life_ms = timeout_ms + LEFTOVER_MS
local deadline_ms = whole(due_in(timeout_ms))
local extra = params.choices ~= '' and {'c', params.choices} or {}
if params.prefixes ~= '' and redis.call('HLEN', P .. 'workers') > 1 then
  extra[#extra + 1] = 'p'
  extra[#extra + 1] = params.prefixes
end
local entry = redis.call('XADD', queue, '*', 'v', SCHEMA_VERSION, 'id', id, unpack(extra))
expire_at_least(queue, life_ms)
redis.call('HSET', job_key, 'v', SCHEMA_VERSION, 'state', 'queued', 'model', model, 'tenant', tenant,
  'kind', params.kind, 'attempt', 0, 'crashes', 0, 'n', 0, 'b', 0, 'prompt_tokens', params.prompt_tokens,
  'q', queue, 'qid', entry, 'lane', params.lane, 'work', whole(own_work), 'sub_ms', whole(now),
  'deadline_ms', deadline_ms, 'fe', reader, 'og', params.grace, 'crid', params.crid,
  'sampling', params.sampling, 'held', whole(fixed_bytes), 'held_log', whole(log_bytes))
if params.text_ms == params.record_ms then params.text_ms = '' end  -- as the record
for _, name in ipairs({'retain_ms', 'record_ms', 'text_ms', 'own_text', 'choices', 'idem', 'prompt_digest'}) do
  if (params[name] or '') ~= '' then redis.call('HSET', job_key, name, params[name]) end
end
if is_in_reserve then redis.call('HSET', job_key, 'brief', 1) end
if params.tokens_per_minute ~= '' then redis.call('HSET', job_key, 'reserved', whole(reserved)) end
redis.call('PEXPIRE', job_key, whole(life_ms))
redis.call('SET', P .. 'req:' .. id, params.request, 'PX', whole(life_ms))
if params.facts ~= '' then redis.call('SET', P .. 'facts:' .. id, params.facts, 'PX', whole(life_ms)) end
local retain_ms = tonumber(params.retain_ms ~= '' and params.retain_ms or RETAIN_MS)
if index then refer_to_parts(tenant, index, timeout_ms + retain_ms, params) end
redis.call('DEL', P .. 'tombstone:' .. id)  -- of a job whose id is determined, and which ran long ago
if params.idem ~= '' then
  redis.call('HSET', P .. 'idem:' .. params.idem, 'id', id, 'body', params.idem_body)
  redis.call('PEXPIRE', P .. 'idem:' .. params.idem, whole(life_ms))
end
redis.call('ZADD', P .. 'live', deadline_ms, id)
expire_at_least(P .. 'live', life_ms)
if queue_timeout_ms then
  redis.call('HSET', job_key, 'queue_deadline_ms', whole(due_in(queue_timeout_ms)))
  redis.call('ZADD', P .. 'unbegun', whole(due_in(queue_timeout_ms)), id)
  expire_at_least(P .. 'unbegun', life_ms)
end
count_job(id, nil, 'queued', {tenant = tenant, prompt_tokens = params.prompt_tokens, lane = params.lane,
  q = queue, work = whole(own_work), model = model, deadline_ms = deadline_ms})
hold(tenant, fixed_bytes + log_bytes, life_ms)
redis.call('HSET', tenant_key, 'newest' .. base, lane)
expire_at_least(tenant_key, life_ms)
local left = {}
for k, rate in ipairs(rates) do
  left[k] = reply_of(rate[1], rate[3], use(tenant, rate[1], rate[2], rate[3]))
end
if params.dead_letter ~= '' then take_dead_letter(params.dead_letter, id) end
-- The caller is alive: without this a frontend's first job could count as orphaned before its first
-- heartbeat.
local frontend = frontend_of(reader)
if frontend then
  local lease_ms = params.frontend_lease_ms
  redis.call('SET', P .. 'f:' .. frontend, lease_ms, 'PX', lease_ms, 'NX')
end
return {'OK', entry, left}
