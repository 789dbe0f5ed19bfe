-- What happened in each HISTORY_SLOT_MS, kept for an hour, for people to look at. No transition depends on it:
-- a write that the server refuses (maxmemory) is left out.
local HISTORY_SLOT_MS, HISTORY_LIFE_MS = 30000, 3660000  -- shared.transport.deployment has the first, too
local TTFT_PER_OCTAVE, TTFT_LAST = 8, 255                -- buckets of the time to the first token; likewise

local function history_key()
  return P .. 'history:' .. whole(math.floor(server_ms() / HISTORY_SLOT_MS))
end

local function keep_history(key)
  if redis.call('PTTL', key) < 0 then redis.pcall('PEXPIRE', key, HISTORY_LIFE_MS) end
end

-- Bucket b has the times from 2^(b/8) ms up to the next. Rows of a batch, which wait for all others, do
-- not count; their ids have a '_'.
local function note_first_token(id, job_key)
  if string.find(id, '_', 1, true) then return end
  local ttft_ms = now_ms() - tonumber(redis.call('HGET', job_key, 'sub_ms') or now_ms())
  local bucket = math.floor(TTFT_PER_OCTAVE * math.log(math.max(ttft_ms, 1)) / math.log(2) + 1e-9)
  local key = history_key()
  redis.pcall('HINCRBY', key, 't' .. whole(math.min(bucket, TTFT_LAST)), 1)
  keep_history(key)
end

-- The most jobs that waited and ran, and the jobs accepted and ended so far. Called once a second or more
-- often, so it writes only changes.
local function note_queue()
  local stat, flat = {}, redis.call('HGETALL', P .. 'stat')
  for k = 1, #flat, 2 do stat[flat[k]] = tonumber(flat[k + 1]) end
  local queued, running, ended = stat.queued or 0, stat.running or 0, 0
  for state in pairs(TERMINAL) do ended = ended + (stat[state .. '_total'] or 0) end
  local key = history_key()
  local kept = redis.call('HMGET', key, 'queued', 'running', 'accepted', 'ended')
  local now = {whole(math.max(queued, tonumber(kept[1] or '0'))),
    whole(math.max(running, tonumber(kept[2] or '0'))), whole(ended + queued + running), whole(ended)}
  local before = {kept[1] or '', kept[2] or '', kept[3] or '', kept[4] or ''}
  if table.concat(now, '|') == table.concat(before, '|') then return end
  redis.pcall('HSET', key, 'queued', now[1], 'running', now[2], 'accepted', now[3], 'ended', now[4])
  keep_history(key)
end
