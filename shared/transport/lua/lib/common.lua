-- Common ground of every transition.
-- ARGV[1] is the key prefix, ARGV[2] how long an ended job is kept (ms).
-- KEYS[1] is any key with the prefix: it only selects the cluster's node.
local P = ARGV[1]
local RETAIN_MS = tonumber(ARGV[2])
local SCHEMA_VERSION = 1       -- of job hashes and queue entries; the same number as shared.transport.wire.SCHEMA_VERSION
-- A job's keys outlive its deadline by this: until a process reaps it, and for when the server's clock,
-- by which Redis expires keys, is set forward (a wrong time zone: 14 hours at most).
local LEFTOVER_MS = 86400000
local RELEASED = '_released'   -- pseudo consumer that owns entries given back by a worker
local WORK_LIFE_MS = 86400000  -- a model's work figures, after its last job
local TOMBSTONE_MS = 600000   -- an end is known at least this long; shared.transport.ports.jobs has the same
local GROUP = 'w'
-- Another command in a cluster (scripts.py puts it here): there PUBLISH goes to every node.
local PUBLISH = 'PUBLISH'

local TERMINAL = {finished = true, failed = true, cancelled = true, expired = true}

-- What the server's clock shows. It may be set: no deadline is measured by it alone.
local function server_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Without any heartbeat or reap, or back in time, for this long: Redis was unavailable, or its clock
-- was set.
local SILENCE_MS = 2000

-- Fields of the hash `pulse`, read once: `shown` as now_ms gives it, `running` as if time had passed.
local clock = nil

local function read_clock()
  if clock then return clock end
  local kept = redis.call('HMGET', P .. 'pulse', 'at_ms', 'skew_ms', 'stands_ms')
  local server, skew = server_ms(), tonumber(kept[2] or '0')
  local at = tonumber(kept[1] or server)
  clock = {running = server - skew, shown = server - skew}
  if kept[3] then
    clock.shown = tonumber(kept[3])
  elseif math.abs(server - at) > SILENCE_MS then
    clock.shown = at - skew
  end
  return clock
end

-- The time of all deadlines and stamps: the server's clock, less its steps (lib/pulse.lua).
-- It stands still while it is unknown whether time has passed or the clock was set. Clocks of workers
-- and frontends never matter.
local function now_ms()
  return read_clock().shown
end

-- The time `ms` from now; rather too late than too early while time stands still.
local function due_in(ms)
  return math.max(read_clock().shown, read_clock().running) + ms
end

-- Lua prints large floats in scientific notation; ids, times and counts are whole numbers.
local function whole(number)
  return string.format('%.0f', number)
end

-- Gives a little more than `ms`, so that of many calls in a row only the first one writes. Returns whether
-- the key had a life that was renewed.
local SPARE = 1 / 64
local function expire_at_least(key, ms)
  local left_ms = redis.call('PTTL', key)
  if left_ms >= ms then return false end
  redis.call('PEXPIRE', key, whole(ms * (1 + SPARE)))
  return left_ms >= 0
end

-- The record of an ended job expires in `kept_ms`. A tombstone shows for TOMBSTONE_MS that the job has ended:
-- Redis has lost a job with neither record nor tombstone, and a process that was sure of it within that
-- time may restore it.
local function bury_record(id, kept_ms)
  if tonumber(kept_ms) < TOMBSTONE_MS then redis.call('SET', P .. 'tombstone:' .. id, '', 'PX', TOMBSTONE_MS) end
end

-- The fields of a job that it has, by their names.
local function read_job(id, ...)
  local job, values = {}, redis.call('HMGET', P .. 'job:' .. id, ...)
  for k, name in ipairs({...}) do job[name] = values[k] or nil end
  return job
end

-- A job's claims with this one appended: lines of attempt, time, tokens logged, deaths so far and
-- worker, the last MAX_CLAIMS of them. A repeated claim changes nothing.
local MAX_CLAIMS = 16

local function with_claim(claims, attempt, n, deaths, wid)
  local line = table.concat({attempt, whole(now_ms()), n or '0', deaths or '0', wid}, '|')
  if not claims or claims == '' then return line end
  local last = string.match(claims, '([^|\n]*)|[^\n]*$')
  if last == attempt then return claims end
  local _, breaks = string.gsub(claims, '\n', '\n')
  if breaks + 1 >= MAX_CLAIMS then claims = string.match(claims, '\n(.*)$') end
  return claims .. '\n' .. line
end

-- Notes how a claim ended that did not end its job: a line of attempt, time of its last delta ('' without
-- one) and cause, the last MAX_CLAIMS of them. The first line of an attempt stays.
local function note_claim_end(id, attempt, cause)
  local job_key = P .. 'job:' .. id
  local had = redis.call('HMGET', job_key, 'ends', 'last_ms')
  local ends, line = had[1] or '', table.concat({attempt, had[2] or '', cause}, '|')
  if string.match(ends, '([^|\n]*)|[^|\n]*|[^\n]*$') == attempt then return end
  local _, breaks = string.gsub(ends, '\n', '\n')
  if breaks + 1 >= MAX_CLAIMS then ends = string.match(ends, '\n(.*)$') end
  redis.call('HSET', job_key, 'ends', ends == '' and line or ends .. '\n' .. line)
end

-- The sorted sets that list a job (id -> deadline) while it is in a state: of all jobs, of its tenant, and
-- while it waits also of its model.
local function indexes_of(job, state)
  local tenant = P .. state .. ':tenant:' .. (job.tenant or '')
  if state == 'running' then return {P .. 'running', tenant} end
  return {P .. 'queued', tenant, P .. 'queued:model:' .. (job.model or '')}
end

local function list_job(id, job, state)
  local deadline, now = tonumber(job.deadline_ms or '0'), now_ms()
  for _, index in ipairs(indexes_of(job, state)) do
    redis.call('ZADD', index, whole(deadline), id)
    -- Jobs that an older release ended stay listed; readers skip them, and they are dropped here now and then.
    if expire_at_least(index, math.max(deadline - now, 0) + LEFTOVER_MS) then
      redis.call('ZREMRANGEBYSCORE', index, '-inf', whole(now - LEFTOVER_MS))
    end
  end
end

local function unlist_job(id, job, state)
  for _, index in ipairs(indexes_of(job, state)) do redis.call('ZREM', index, id) end
end

-- Gauges: waiting and running jobs in all and per tenant, and per model and lane the waiting work (tokens,
-- of the prompt and expected of the output). The job's hash exists and has its model, lane and tenant.
-- The job is listed and unlisted here too.
-- `from`, `to`: 'queued', 'running', or nil: not yet, no longer. A tenant without live jobs leaves nothing.
-- `known`: the fields that are read here, if the caller has them.
local function count_job(id, from, to, known)
  local job = known
    or read_job(id, 'tenant', 'prompt_tokens', 'lane', 'q', 'work', 'model', 'deadline_ms')
  local tenant_key, base = P .. 'tenant:' .. (job.tenant or ''), job.lane
  local model, lane = string.match(string.sub(job.q or '', #P + 1), '^q:(.*):(%d)$')

  local function count(state, step)
    redis.call('HINCRBY', P .. 'stat', state, step)
    redis.call('HINCRBY', tenant_key, state, step)
    if state ~= 'queued' then return end
    local tokens = whole(step * tonumber(job.prompt_tokens or '0'))
    redis.call('HINCRBY', P .. 'stat', 'queued_tokens', tokens)
    redis.call('HINCRBY', tenant_key, 'queued_tokens', tokens)
    if not (base and model and job.work) then return end  -- of an older release
    local work_key, left_ms = P .. 'work:' .. model, tonumber(job.deadline_ms or '0') - now_ms()
    redis.call('HINCRBY', work_key, lane, whole(step * tonumber(job.work)))
    expire_at_least(work_key, math.max(left_ms, 0) + WORK_LIFE_MS)
    if redis.call('HINCRBY', tenant_key, 'base' .. base, step) <= 0 then
      redis.call('HDEL', tenant_key, 'base' .. base, 'newest' .. base)
    end
  end

  if to then
    count(to, 1)
    list_job(id, job, to)
  end
  if from then
    unlist_job(id, job, from)
    count(from, -1)
  end
  if not to then
    local left = redis.call('HMGET', tenant_key, 'queued', 'running')
    if tonumber(left[1] or '0') <= 0 and tonumber(left[2] or '0') <= 0 then
      redis.call('DEL', tenant_key)
    end
  end
end
