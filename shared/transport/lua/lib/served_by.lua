-- Needs latch.lua, pulse.lua and release.lua. Which workers may run a job.
--
-- A worker's lease has `prompt_digest`, of what prompts are prepared with (tokenizer, template), and
-- `weights_digest`. A job has the `prompt_digest` that it was prepared for, and from its first output on the
-- `weights_digest` of the worker that computed it. A missing digest fits every other one: the job or the
-- worker is of an older release. `adapters` of a lease is a JSON object: LoRA adapters' names and digests, which
-- stand for `weights_digest` in jobs whose model is one of them.
--
-- A job that its claimer may not run is set aside for the workers that may, under a pseudo consumer that
-- only these look at (recover.lua); without such a worker it ends as `model_replaced`.
local ASIDE = '_for:'

-- A digest of each kind, '' for any: '<prompt_digest>:<weights_digest>'.
local function needs(job)
  local has_output = (job.n or '0') ~= '0' or job.ps
  return (job.prompt_digest or '') .. ':' .. (has_output and job.weights_digest or '')
end

-- The digest of what computes this model's output at a worker; '' unknown.
local function weights_at(wid, model)
  local has = redis.call('HMGET', P .. 'w:' .. wid, 'weights_digest', 'adapters')
  local adapters = (has[2] or '') ~= '' and cjson.decode(has[2]) or {}
  return adapters[model] or has[1] or ''
end

local function fits(wid, need)
  if need == ':' then return true end
  local prompt, weights = string.match(need, '^(.*):(.*)$')
  local has = redis.call('HMGET', P .. 'w:' .. wid, 'prompt_digest', 'weights_digest', 'adapters')
  local function same(wanted, found) return wanted == '' or not found or found == '' or wanted == found end
  local is_adapters = weights ~= '' and string.find(has[3] or '', weights, 1, true) ~= nil
  return same(prompt, has[1]) and (is_adapters or same(weights, has[2]))
end

-- Whether a live worker that takes jobs may run it, or one that an operator drains: the drain may be taken back.
-- Only a lease that names digests counts: a worker without them may be of any model. After an outage ended
-- leases mean nothing: there may be one.
local function is_served(need)
  if leases_mean_nothing() then return true end
  for _, wid in ipairs(redis.call('HKEYS', P .. 'workers')) do
    local lease = redis.call('HMGET', P .. 'w:' .. wid, 'beat_ms', 'draining', 'prompt_digest', 'order')
    local takes_jobs = lease[2] ~= '1' or lease[4] == 'drain'
    if lease[1] and takes_jobs and (lease[3] or '') ~= '' and fits(wid, need) then return true end
  end
  return false
end

-- Sets a job's entry aside for other workers, or ends the job; XCLAIM comes first: it is allowed above
-- maxmemory.
local function set_aside(id, queue, entry, wid, state, need)
  if not is_served(need) then
    latch(id, {state = 'failed', reason = 'model_replaced', by = wid})
    return
  end
  if state == 'running' then
    release(id, queue, entry, wid, ASIDE .. need)
  else
    redis.call('XCLAIM', queue, GROUP, ASIDE .. need, 0, entry, 'JUSTID')
  end
  redis.call('SADD', P .. 'aside', need)
  expire_at_least(P .. 'aside', LEFTOVER_MS + math.max(0, redis.call('PTTL', P .. 'live')))
end
