-- restore: a worker restores a job that Redis has lost while it ran (FLUSHALL, the last part of
-- the append-only file, a failover), or takes back a claim that the server has lost.
-- ARGV: 3 worker, 4 id, 5 attempt, 6 how long ago the server last knew this claim (ms),
--   7 the rest of its timeout (ms), 8 request, 9 facts ('' none), 10.. names and values of the job's
--   hash as at its claim
-- Returns 'restored'; 'over': it has ended, or may have; 'fenced': another attempt owns it;
--   'nolease': the worker must send a heartbeat first. Idempotent.
-- The proof of loss: an ended job has a record or a tombstone for TOMBSTONE_MS, and the worker was sure
-- of its claim within that time. An attempt never shrinks: a smaller one is of a state before the claim.
-- The deadline is computed again from the rest of the timeout: the `skew_ms` of the stored one may be lost
-- too.
-- The log comes from the worker's next appends, which meet a gap. XADD is the first write, so above
-- maxmemory nothing is restored.
--@include lib/common.lua
--@include lib/held.lua
local wid, id, attempt = ARGV[3], ARGV[4], ARGV[5]
local job_key = P .. 'job:' .. id
if redis.call('EXISTS', P .. 'w:' .. wid) == 0 then return 'nolease' end

-- The entry is pending for this worker also where it was never delivered; pull.lua leaves it so.
local function claim_entry(queue, entry)
  redis.pcall('XGROUP', 'CREATE', queue, GROUP, '0')
  redis.call('XCLAIM', queue, GROUP, wid, 0, entry, 'FORCE', 'JUSTID')
end

local function own()
  local had = redis.call('HMGET', job_key, 'claims', 'n', 'deaths')
  redis.call('HSET', job_key, 'state', 'running', 'owner', wid, 'attempt', attempt,
    'claim_ms', whole(now_ms()),
    'claims', with_claim(had[1] or nil, attempt, had[2] or nil, had[3] or nil, wid))
  redis.call(PUBLISH, P .. 'ch:' .. id, 'S|' .. attempt .. '|' .. wid)
  return 'restored'
end

local function take_back(job)
  if TERMINAL[job.state] then return 'over' end
  if job.owner == wid and job.attempt == attempt then return 'restored' end
  if tonumber(job.attempt) >= tonumber(attempt) then return 'fenced' end
  claim_entry(job.q, job.qid)
  redis.call('ZREM', P .. 'unbegun', id)
  if job.state == 'queued' then count_job(id, 'queued', 'running') end
  if (job.owner or '') ~= '' and job.owner ~= wid then
    redis.call(PUBLISH, P .. 'ctl:' .. job.owner, id)
  end
  redis.call('HSETNX', job_key, 'start_ms', whole(now_ms()))
  return own()
end

-- Fields that are written again, or belong to records that were lost with the job.
local LEFT_OUT = {state = true, owner = true, attempt = true, n = true, b = true, h = true, q = true,
  qid = true, ps = true, claim_ms = true, deadline_ms = true, orphan_ms = true, reserved = true,
  idem_body = true, lp_bytes = true}

local function put_back()
  local fields, kept = {}, {}
  for i = 10, #ARGV, 2 do
    fields[ARGV[i]] = ARGV[i + 1]
    if not LEFT_OUT[ARGV[i]] then
      kept[#kept + 1] = ARGV[i]
      kept[#kept + 1] = ARGV[i + 1]
    end
  end
  local left_ms = tonumber(ARGV[7])
  local deadline_ms, life_ms = whole(due_in(left_ms)), left_ms + LEFTOVER_MS
  local choices = fields.choices and {'c', fields.choices} or {}
  local entry = redis.call('XADD', fields.q, '*', 'v', fields.v, 'id', id, unpack(choices))
  expire_at_least(fields.q, life_ms)
  redis.call('DEL', P .. 'log:' .. id)
  redis.call('HSET', job_key, 'n', 0, 'b', 0, 'q', fields.q, 'qid', entry,
    'deadline_ms', deadline_ms, unpack(kept))
  redis.call('PEXPIRE', job_key, whole(life_ms))
  redis.call('SET', P .. 'req:' .. id, ARGV[8], 'PX', whole(life_ms))
  if ARGV[9] ~= '' then redis.call('SET', P .. 'facts:' .. id, ARGV[9], 'PX', whole(life_ms)) end
  if fields.idem and (fields.idem_body or '') ~= '' then
    local key = P .. 'idem:' .. fields.idem
    if redis.call('EXISTS', key) == 0 then
      redis.call('HSET', key, 'id', id, 'body', fields.idem_body)
      redis.call('PEXPIRE', key, whole(life_ms))
    end
  end
  redis.call('ZADD', P .. 'live', deadline_ms, id)
  expire_at_least(P .. 'live', life_ms)
  claim_entry(fields.q, entry)
  count_job(id, nil, 'running')
  hold(fields.tenant, tonumber(fields.held or '0') + tonumber(fields.held_log or '0'), life_ms)
  expire_at_least(P .. 'tenant:' .. fields.tenant, life_ms)
  return own()
end

-- A tombstone of a time before this job was accepted is of an earlier job with its id: submit deleted it, and
-- that was lost too.
local function has_ended()
  local tombstone = redis.call('GET', P .. 'tombstone:' .. id)
  if not tombstone then return false end
  local ended_ms, accepted_ms = tonumber(string.match(tombstone, '^%d+')), nil
  for i = 10, #ARGV, 2 do
    if ARGV[i] == 'sub_ms' then accepted_ms = tonumber(ARGV[i + 1]) end
  end
  return not (ended_ms and accepted_ms and ended_ms < accepted_ms)
end

local job = read_job(id, 'state', 'owner', 'attempt', 'q', 'qid')
if job.state then return take_back(job) end
if tonumber(ARGV[6]) >= TOMBSTONE_MS or has_ended() then return 'over' end
return put_back()
