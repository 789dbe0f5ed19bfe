-- Common ground of every transition.
-- ARGV[1] is the key prefix of the partition, ARGV[2] how long an ended job is kept (ms).
-- KEYS[1] is any key of the partition: it only tells a cluster where to run the script.
local P = ARGV[1]
local RETAIN_MS = tonumber(ARGV[2])
local SCHEMA_VERSION = 1       -- of job hashes and queue entries; the same number as shared.codec.SCHEMA_VERSION
local LEFTOVER_MS = 3600000    -- what a job's keys outlive its deadline by when nobody is there to reap it
local RELEASED = '_released'   -- pseudo consumer that owns entries given back by a worker
local GROUP = 'w'
-- Another command in a cluster (scripts.py puts it here): there PUBLISH goes to every node.
local PUBLISH = 'PUBLISH'

local TERMINAL = {finished = true, failed = true, cancelled = true, expired = true}

-- All clocks are the server's: those of workers and frontends never matter.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Lua prints large floats in scientific notation; ids, times and counts are whole numbers.
local function whole(number)
  return string.format('%.0f', number)
end

local function expire_at_least(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, whole(ms)) end
end

-- Gauges of jobs by state, in total and per tenant; a tenant without live jobs leaves nothing.
local function count_job(tenant, prompt_tokens, state, step)
  local tenant_key = P .. 'tenant:' .. (tenant or '')
  redis.call('HINCRBY', P .. 'stat', state, step)
  redis.call('HINCRBY', tenant_key, state, step)
  if state == 'queued' then
    local tokens = whole(step * tonumber(prompt_tokens or '0'))
    redis.call('HINCRBY', P .. 'stat', 'queued_tokens', tokens)
    redis.call('HINCRBY', tenant_key, 'queued_tokens', tokens)
  end
  if step < 0 then
    local left = redis.call('HMGET', tenant_key, 'queued', 'running')
    if (tonumber(left[1] or '0') <= 0) and (tonumber(left[2] or '0') <= 0) then
      redis.call('DEL', tenant_key)
    end
  end
end
