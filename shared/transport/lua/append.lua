-- append: one engine step of all jobs of a worker: log, then publish, then perhaps end the job.
-- The end is in the same call: a worker that dies between two calls would leave a complete log whose
-- job still runs, and every step would cost a second round trip.
-- ARGV: 3 worker, 4 lease_ms, then per item 11: id, attempt, n0, b0, h0, n1, b1, h1, token ids, text, and
--   the number of arguments that follow: names and values of what few items have.
--   lp: logprobs (JSON). c: segments (JSON without '|'); without, all of it is choice 0's.
--   cached: cached tokens. preemptions: how often it was preempted for jobs of higher lanes.
--   state, reason, tail: the end; tail is stop_reason|message (stop_reason is JSON
--   without '|'). scores: the item is that slice (`slice`, from 0) of the prompt's log probabilities and
--   holds nothing else. slice without scores: how many of them come before the first delta.
-- Returns one reply per item: ok, gap:<n>-<b>, diverged:<n>-<b>, fenced, gone, ended:<state>:<reason>,
--   bad:<why>, error:<why>.
-- Idempotent: the same item again answers ok, and so does the same end by the same attempt.
-- Progress renews the lease; it is also the write that lets the rest run above maxmemory. A script is
-- atomic but never rolled back, so every item is validated before it writes and XADD runs under pcall.
-- A token costs the server little but this script: the usual item makes four calls and few strings.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
--@include lib/latch.lua
--@include lib/history.lua
local wid, lease_ms = ARGV[3], tonumber(ARGV[4])
local FIXED = 11
local NOTHING = {}
local now = nil   -- one time for all items, as stored
local num_logged = 0

local function stamp()
  now = now or whole(now_ms())
  return now
end

-- Fields of the job that few items need.
local function field(id, name)
  return redis.call('HGET', P .. 'job:' .. id, name) or nil
end

local function ended_by_us(id, job, item, more)
  return more.state and job.state == more.state and field(id, 'by') == wid
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

-- Checks an item. Returns a verdict, or nil to continue, and whether the delta is logged already.
local function check(id, job, item, more)
  if not job.state then return 'gone' end
  if TERMINAL[job.state] then
    if ended_by_us(id, job, item, more) then return 'ok' end
    if tonumber(job.attempt) > tonumber(item.attempt) then return 'fenced' end
    return 'ended:' .. job.state .. ':' .. (field(id, 'reason') or '')
  end
  if job.attempt ~= item.attempt then
    -- Attempts only grow: the server has lost the claim, and the worker may have it back (restore.lua).
    return tonumber(job.attempt) < tonumber(item.attempt) and 'gone' or 'fenced'
  end
  if job.owner ~= wid then return 'fenced' end
  local slice = more.slice and tonumber(more.slice)
  if more.scores then
    local slices = tonumber(field(id, 'ps') or '0')
    if not slice then return 'bad:slice' end
    if slice > slices then return 'gap:' .. job.n .. '-' .. job.b end
    return nil, slice < slices
  end
  local n0, n1, b0, b1 = tonumber(item.n0), tonumber(item.n1), tonumber(item.b0), tonumber(item.b1)
  if not (n0 and n1 and b0 and b1) then return 'bad:number' end
  if n1 < n0 or b1 - b0 ~= #item.text then return 'bad:range' end
  if n1 == n0 and not more.state then return 'bad:empty' end
  if more.c then
    local sound, sum = pcall(total, more.c)
    if not sound or sum[1] ~= n1 - n0 or sum[2] ~= b1 - b0 then return 'bad:segments' end
  end
  if slice and job.n == '0' and tonumber(field(id, 'ps') or '0') < slice then
    return 'gap:' .. job.n .. '-' .. job.b
  end
  if job.n == item.n1 and job.h == item.h1 and job.b == item.b1 then return nil, true end
  if job.n ~= item.n0 then return 'gap:' .. job.n .. '-' .. job.b end
  if job.h ~= item.h0 or job.b ~= item.b0 then return 'diverged:' .. job.n .. '-' .. job.b end
  return nil, false
end

-- Adds an entry. The first entry of a new or deleted log sets the log's expiry.
-- Returns nil, or the server's error.
local function add(id, ...)
  local log_key = P .. 'log:' .. id
  local added = redis.pcall('XADD', log_key, 'NOMKSTREAM', ...)
  if not added then
    added = redis.pcall('XADD', log_key, ...)
    if type(added) == 'string' then
      local left_ms = math.max(tonumber(field(id, 'deadline_ms') or '0') - now_ms(), 0)
      redis.call('PEXPIRE', log_key, whole(left_ms + LEFTOVER_MS))
    end
  end
  return type(added) == 'table' and added.err or nil
end

-- No frame: readers of the prompt's log probabilities read the log, when the first delta comes.
local function log_slice(id, more)
  local slice = whole(tonumber(more.slice) + 1)
  local failure = add(id, '0-' .. slice, 'k', 'prompt', 'lp', more.scores)
  if failure then return 'error:' .. failure end
  redis.call('HSET', P .. 'job:' .. id, 'ps', slice)
end

-- A log that is longer than it was expected to be counts for twice as much, so that few deltas count.
local function count_log(id, job, item, more)
  local lp, held = more.lp or more.scores, job.held_log and tonumber(job.held_log)
  local bytes = item.b1 + TOKEN_BYTES * item.n1
  if lp then bytes = bytes + redis.call('HINCRBY', P .. 'job:' .. id, 'lp_bytes', #lp) end
  if not held or bytes <= held then return end  -- without `held`: a job of an older release
  redis.call('HSET', P .. 'job:' .. id, 'held_log', whole(2 * bytes))
  hold(field(id, 'tenant') or '', 2 * bytes - held)
end

-- What only the first delta of a claim, or of a job, changes.
local function begin_output(id, job, job_key)
  if not job.out then redis.call('HSET', job_key, 'out_ms', stamp()) end
  if job.n == '0' and redis.call('HSETNX', job_key, 'first_ms', stamp()) == 1 then
    note_count('in', field(id, 'prompt_tokens') or '0')
    note_first_token(id, job_key)
  end
end

local function log_delta(id, job, job_key, item, more)
  local failure
  local lp, c, at = more.lp, more.c, item.n1 .. '-' .. item.b1
  if lp and c then
    failure = add(id, at, 't', item.tokens, 'd', item.text, 'lp', lp, 'c', c)
  elseif lp then
    failure = add(id, at, 't', item.tokens, 'd', item.text, 'lp', lp)
  elseif c then
    failure = add(id, at, 't', item.tokens, 'd', item.text, 'c', c)
  else
    failure = add(id, at, 't', item.tokens, 'd', item.text)
  end
  if failure then return 'error:' .. failure end
  num_logged = num_logged + item.n1 - item.n0
  redis.call('HSET', job_key, 'n', item.n1, 'b', item.b1, 'h', item.h1, 'last_ms', stamp())
  if not job.out or job.n == '0' then begin_output(id, job, job_key) end
  local place = item.n0 .. '|' .. item.n1 .. '|' .. item.b1 .. '|'
  redis.call(PUBLISH, P .. 'ch:' .. id, (c and 'C|' .. place .. c .. '|' or 'D|' .. place)
    .. item.tokens .. '|' .. (lp or '') .. '|' .. item.text)
  -- A job that gave a token does not kill workers at once; one that does so later meets MAX_DEATHS.
  if (job.crashes ~= '0' or job.losses) and item.n1 ~= item.n0 then
    redis.call('HSET', job_key, 'crashes', 0)
    redis.call('HDEL', job_key, 'losses')
    if redis.call('GET', P .. 'probe:' .. wid) == id then redis.call('DEL', P .. 'probe:' .. wid) end
  end
  return nil
end

local function apply(id, item, more)
  local job_key = P .. 'job:' .. id
  local got = redis.call('HMGET', job_key, 'state', 'owner', 'attempt', 'n', 'b', 'h', 'crashes', 'losses',
    'out_ms', 'held_log')
  local job = {state = got[1], owner = got[2], attempt = got[3], n = got[4] or '0', b = got[5] or '0',
    h = got[6] or '', crashes = got[7] or '0', losses = got[8], out = got[9],
    held_log = got[10]}
  local verdict, logged = check(id, job, item, more)
  if verdict then return verdict end
  if not logged then
    local failure
    if more.scores then failure = log_slice(id, more) else failure = log_delta(id, job, job_key, item, more) end
    if failure then return failure end
    count_log(id, job, item, more)
    if more.cached then redis.call('HSETNX', job_key, 'cached_tokens', more.cached) end
    if more.preemptions then redis.call('HSET', job_key, 'preemptions', more.preemptions) end
  end
  if more.state then
    local bar = string.find(more.tail, '|', 1, true)
    latch(id, {state = more.state, reason = more.reason, by = wid,
      stop_reason = string.sub(more.tail, 1, bar - 1), message = string.sub(more.tail, bar + 1),
      cached = more.cached})
  end
  return 'ok'
end

redis.call('PEXPIRE', P .. 'w:' .. wid, whole(math.max(redis.call('PTTL', P .. 'w:' .. wid), lease_ms)))
local verdicts, i, num_args = {}, 5, #ARGV
while i <= num_args do
  local past, more = i + FIXED + tonumber(ARGV[i + 10]), NOTHING
  if past > i + FIXED then
    more = {}
    for k = i + FIXED, past - 1, 2 do more[ARGV[k]] = ARGV[k + 1] end
  end
  verdicts[#verdicts + 1] = apply(ARGV[i], {attempt = ARGV[i + 1], n0 = ARGV[i + 2], b0 = ARGV[i + 3],
    h0 = ARGV[i + 4], n1 = ARGV[i + 5], b1 = ARGV[i + 6], h1 = ARGV[i + 7], tokens = ARGV[i + 8],
    text = ARGV[i + 9]}, more)
  i = past
end
if num_logged > 0 then note_count('out', whole(num_logged)) end
return verdicts
