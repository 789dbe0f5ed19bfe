-- append: one engine step of all jobs of a worker: log, then publish, then perhaps end the job.
-- ARGV: 3 worker, 4 lease_ms, then 18 per item: id, attempt, n0, b0, h0, n1, b1, h1, token ids,
--   logprobs (JSON or ''), segments (JSON without '|'; '': all of it is choice 0's), text,
--   cached tokens ('' unknown), end state ('' goes on), reason, stop_reason|message (stop_reason is
--   JSON without '|'), slice, scores. With scores the item is that slice (from 0) of the prompt's log
--   probabilities and holds nothing else; without, slice is how many of them come before the first
--   delta ('' none)
-- Returns one word per item: ok, gap:<n>-<b>, diverged:<n>-<b>, fenced, gone, ended:<state>:<reason>,
--   bad:<why>, error:<why>.
-- Idempotent: the same item again answers ok, and so does the same end by the same attempt.
-- Progress renews the lease; it is also the write that lets the rest run above maxmemory. A script is
-- atomic but never rolled back, so every item is validated before it writes and XADD runs under pcall.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/latch.lua
--@include lib/history.lua
local wid, lease_ms = ARGV[3], tonumber(ARGV[4])
local STRIDE = 18

local function ended_by_us(job, item)
  return item.state ~= '' and job.state == item.state and job.by == wid
    and job.attempt == item.attempt and job.n == item.n1 and job.h == item.h1
end

-- Tokens and bytes of all segments together.
local function total(segments)
  local tokens, bytes = 0, 0
  for _, segment in ipairs(cjson.decode(segments)) do
    if segment[1] < 0 or segment[2] < 0 or segment[3] < 0 then error('negative') end
    tokens, bytes = tokens + segment[2], bytes + segment[3]
  end
  return {tokens, bytes}
end

-- Is there something to log? Returns verdict or nil to go on, and whether the delta is logged already.
local function check(job, item)
  if not job.state then return 'gone' end
  if TERMINAL[job.state] then
    if ended_by_us(job, item) then return 'ok' end
    if tonumber(job.attempt) > tonumber(item.attempt) then return 'fenced' end
    return 'ended:' .. job.state .. ':' .. job.reason
  end
  -- Attempts only grow: the server has lost the claim, and the worker may have it back (restore.lua).
  if tonumber(job.attempt) < tonumber(item.attempt) then return 'gone' end
  if job.owner ~= wid or job.attempt ~= item.attempt then return 'fenced' end
  local at = job.n .. '-' .. job.b
  local slice, slices = tonumber(item.slice or ''), tonumber(job.ps)
  if item.scores ~= '' then
    if not slice then return 'bad:slice' end
    if slice > slices then return 'gap:' .. at end
    return nil, slice < slices
  end
  local n0, n1, b0, b1 = tonumber(item.n0), tonumber(item.n1), tonumber(item.b0), tonumber(item.b1)
  if not (n0 and n1 and b0 and b1) then return 'bad:number' end
  if n1 < n0 or b1 - b0 ~= #item.text then return 'bad:range' end
  if n1 == n0 and item.state == '' then return 'bad:empty' end
  if item.segments ~= '' then
    local sound, sum = pcall(total, item.segments)
    if not sound or sum[1] ~= n1 - n0 or sum[2] ~= b1 - b0 then return 'bad:segments' end
  end
  if slice and slices < slice and job.n == '0' then return 'gap:' .. at end
  if job.n == item.n1 and job.h == item.h1 and job.b == item.b1 then return nil, true end
  if job.n ~= item.n0 then return 'gap:' .. at end
  if job.h ~= item.h0 or job.b ~= item.b0 then return 'diverged:' .. at end
  return nil, false
end

-- This entry began the log, or began it again after the log was deleted.
local function keep_log(job, log_key)
  if redis.call('PTTL', log_key) < 0 then
    redis.call('PEXPIRE', log_key, whole(math.max(tonumber(job.deadline) - now_ms(), 0) + LEFTOVER_MS))
  end
end

-- No frame: readers of the prompt's log probabilities read the log, when the first delta comes.
local function log_slice(job, item)
  local log_key, slice = P .. 'log:' .. item.id, whole(tonumber(item.slice) + 1)
  local added = redis.pcall('XADD', log_key, '0-' .. slice, 'k', 'prompt', 'lp', item.scores)
  if type(added) == 'table' and added.err then return 'error:' .. added.err end
  redis.call('HSET', P .. 'job:' .. item.id, 'ps', slice)
  keep_log(job, log_key)
  return nil
end

local function log_delta(job, item)
  local job_key, log_key = P .. 'job:' .. item.id, P .. 'log:' .. item.id
  local entry = item.n1 .. '-' .. item.b1
  local more = {}
  if item.logprobs ~= '' then more = {'lp', item.logprobs} end
  if item.segments ~= '' then
    more[#more + 1] = 'c'
    more[#more + 1] = item.segments
  end
  local added = redis.pcall('XADD', log_key, entry, 't', item.tokens, 'd', item.text, unpack(more))
  if type(added) == 'table' and added.err then return 'error:' .. added.err end
  local now = whole(now_ms())
  redis.call('HSET', job_key, 'n', item.n1, 'b', item.b1, 'h', item.h1, 'last_ms', now)
  if not job.out then redis.call('HSET', job_key, 'out_ms', now) end
  if job.n == '0' and redis.call('HSETNX', job_key, 'first_ms', now) == 1 then
    note_first_token(item.id, job_key)
  end
  keep_log(job, log_key)
  local frame = item.segments == '' and {'D', item.n0, item.n1, item.b1}
    or {'C', item.n0, item.n1, item.b1, item.segments}
  redis.call(PUBLISH, P .. 'ch:' .. item.id, table.concat(frame, '|') .. '|' .. item.tokens .. '|'
    .. item.logprobs .. '|' .. item.text)
  -- A job that gave a token does not kill workers at once; one that does so later meets MAX_DEATHS.
  if (job.crashes ~= '0' or job.losses) and item.n1 ~= item.n0 then
    redis.call('HSET', job_key, 'crashes', 0)
    redis.call('HDEL', job_key, 'losses')
    if redis.call('GET', P .. 'probe:' .. wid) == item.id then redis.call('DEL', P .. 'probe:' .. wid) end
  end
  return nil
end

local function apply(item)
  local got = redis.call('HMGET', P .. 'job:' .. item.id, 'state', 'owner', 'attempt', 'n', 'b', 'h',
    'crashes', 'reason', 'by', 'deadline_ms', 'losses', 'ps', 'out_ms')
  local job = {state = got[1], owner = got[2], attempt = got[3], n = got[4] or '0', b = got[5] or '0',
    h = got[6] or '', crashes = got[7] or '0', reason = got[8] or '', by = got[9] or '',
    deadline = got[10] or '0', losses = got[11], ps = got[12] or '0', out = got[13]}
  local verdict, logged = check(job, item)
  if verdict then return verdict end
  if not logged then
    local failure = item.scores ~= '' and log_slice(job, item) or nil
    if item.scores == '' then failure = log_delta(job, item) end
    if failure then return failure end
    if item.cached ~= '' then
      redis.call('HSETNX', P .. 'job:' .. item.id, 'cached_tokens', item.cached)
    end
  end
  if item.state ~= '' then
    local bar = string.find(item.tail, '|', 1, true)
    latch(item.id, {state = item.state, reason = item.reason, by = wid,
      stop_reason = string.sub(item.tail, 1, bar - 1), message = string.sub(item.tail, bar + 1),
      cached = item.cached ~= '' and item.cached or nil})
  end
  return 'ok'
end

redis.call('PEXPIRE', P .. 'w:' .. wid, whole(math.max(redis.call('PTTL', P .. 'w:' .. wid), lease_ms)))
local verdicts = {}
for i = 5, #ARGV, STRIDE do
  verdicts[#verdicts + 1] = apply({id = ARGV[i], attempt = ARGV[i + 1], n0 = ARGV[i + 2],
    b0 = ARGV[i + 3], h0 = ARGV[i + 4], n1 = ARGV[i + 5], b1 = ARGV[i + 6], h1 = ARGV[i + 7],
    tokens = ARGV[i + 8], logprobs = ARGV[i + 9], segments = ARGV[i + 10], text = ARGV[i + 11],
    cached = ARGV[i + 12], state = ARGV[i + 13], reason = ARGV[i + 14], tail = ARGV[i + 15],
    slice = ARGV[i + 16], scores = ARGV[i + 17]})
end
return verdicts
