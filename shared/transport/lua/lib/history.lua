-- What happened in each HISTORY_SLOT_MS, kept for an hour, and in each ten minutes, kept for a day, for
-- people to look at. No transition depends on it: a write that the server refuses (maxmemory) is left out.
local HISTORY_SLOT_MS, HISTORY_LIFE_MS = 30000, 3660000  -- shared.transport.deployment has the first, too
local FOLDED, DAY_LIFE_MS = 20, 90000000                 -- slots in one of the day; likewise
local FOLDED_BACK = 6                                    -- slots of the day whose parts are kept that long
local TTFT_PER_OCTAVE, TTFT_LAST = 8, 255                -- buckets of the time to the first token; likewise
-- How a field of the day comes from its parts; the others are sums.
local MOST = {queued = 1, running = 1, age_s = 1, kv = 1, used = 1, limit = 1}
local LAST = {accepted = 1, ended = 1, failed = 1, expired = 1}

local function history_slot()
  return math.floor(server_ms() / HISTORY_SLOT_MS)
end

local function history_key()
  return P .. 'history:' .. whole(history_slot())
end

local function keep_history(key)
  if redis.call('PTTL', key) < 0 then redis.pcall('PEXPIRE', key, HISTORY_LIFE_MS) end
end

-- Adds to a count of this slot.
local function note_count(name, amount)
  local key = history_key()
  if redis.pcall('HINCRBY', key, name, amount) == tonumber(amount) then keep_history(key) end
end

-- Keeps the most of a figure in this slot.
local function note_most(name, value)
  local key = history_key()
  if tonumber(value) <= tonumber(redis.call('HGET', key, name) or '-1') then return end
  redis.pcall('HSET', key, name, value)
  keep_history(key)
end

-- Bucket b has the times from 2^(b/8) ms up to the next. Rows of a batch, which wait for all others, do
-- not count; their ids have a '_'.
local function note_first_token(id, job_key)
  if string.find(id, '_', 1, true) then return end
  local ttft_ms = now_ms() - tonumber(redis.call('HGET', job_key, 'sub_ms') or now_ms())
  local bucket = math.floor(TTFT_PER_OCTAVE * math.log(math.max(ttft_ms, 1)) / math.log(2) + 1e-9)
  note_count('t' .. whole(math.min(bucket, TTFT_LAST)), 1)
end

-- Makes one slot of the day from its parts, unless it exists or none of them does.
local function fold_into_day(day_slot)
  local key, folded = P .. 'history:day:' .. whole(day_slot), {}
  if redis.call('EXISTS', key) == 1 then return end
  for slot = FOLDED * day_slot, FOLDED * (day_slot + 1) - 1 do
    local flat = redis.call('HGETALL', P .. 'history:' .. whole(slot))
    for k = 1, #flat, 2 do
      local name, value, before = flat[k], tonumber(flat[k + 1]) or 0, folded[flat[k]]
      if before and MOST[name] then
        value = math.max(value, before)
      elseif before and not LAST[name] then
        value = value + before
      end
      folded[name] = value
    end
  end
  local fields = {}
  for name, value in pairs(folded) do
    fields[#fields + 1] = name
    fields[#fields + 1] = whole(value)
  end
  if #fields == 0 then return end
  redis.pcall('HSET', key, unpack(fields))
  redis.pcall('PEXPIRE', key, DAY_LIFE_MS)
end

-- The most jobs that waited and ran, and the jobs accepted, ended, failed and expired so far. Called once a
-- second or more often, so it writes only changes; the first call in a slot folds the slots that are over.
local function note_queue()
  local stat, flat = {}, redis.call('HGETALL', P .. 'stat')
  for k = 1, #flat, 2 do stat[flat[k]] = tonumber(flat[k + 1]) end
  local queued, running, ended = stat.queued or 0, stat.running or 0, 0
  for state in pairs(TERMINAL) do ended = ended + (stat[state .. '_total'] or 0) end
  local slot = history_slot()
  local key = P .. 'history:' .. whole(slot)
  local kept = redis.call('HMGET', key, 'queued', 'running', 'accepted', 'ended', 'failed', 'expired')
  local now = {whole(math.max(queued, tonumber(kept[1] or '0'))),
    whole(math.max(running, tonumber(kept[2] or '0'))), whole(ended + queued + running), whole(ended),
    whole(stat.failed_total or 0), whole(stat.expired_total or 0)}
  local before = {}
  for k = 1, #now do before[k] = kept[k] or '' end
  if table.concat(now, '|') == table.concat(before, '|') then return end
  redis.pcall('HSET', key, 'queued', now[1], 'running', now[2], 'accepted', now[3], 'ended', now[4],
    'failed', now[5], 'expired', now[6])
  keep_history(key)
  if kept[1] then return end
  for back = 1, FOLDED_BACK do fold_into_day(math.floor(slot / FOLDED) - back) end
end
