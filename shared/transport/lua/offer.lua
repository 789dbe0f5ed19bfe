-- offer: renews the list of models that a worker can load, and returns the work that waits for each.
-- ARGV: 3 worker, 4 life_ms of the offer, 5 ms that a model's jobs wait before this worker leaves its own,
--   6 ms that a swap takes, 7 the model that it has claimed ('' none), 8 a JSON list of those that it
--   failed to load, then its models
-- Returns for each model: the number of waiting jobs, the ms that the oldest has waited, the number of
-- workers that serve it, and 1 if another worker has claimed it, 2 while that one drains. A model whose queue
-- is paused has no jobs. Jobs wait that are queued, and where no worker serves the model those whose worker
-- has died. After an outage, while leases mean nothing, none has any: which models are served is not known.
-- Every worker calls this often: the parts that read all workers (`serving`, `left`) are computed once in
-- COUNTED_MS for all of them.
--@include lib/common.lua
--@include lib/entry.lua
--@include lib/pulse.lua
--@include lib/offers.lua
local wid, life_ms, bound_ms, swap_ms, claimed = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local MAX_CONSUMERS = 64  -- of one lane that are looked at
local COUNTED_MS = 400    -- less than the time between two looks of a worker
local now = now_ms()
-- First, because it is never refused above maxmemory.
redis.call('PEXPIRE', P .. 'offers', life_ms)
local trusts_leases = not leases_mean_nothing()

-- Counts who serves each model, and drops the offers of dead workers.
local function count_workers()
  for model, num in pairs(count_serving()) do redis.call('HSET', P .. 'serving', model, num) end
  redis.call('HSET', P .. 'serving', '', 0)  -- counted, also where no worker serves
  redis.call('PEXPIRE', P .. 'serving', COUNTED_MS)
  local offers = redis.call('HGETALL', P .. 'offers')
  for k = 1, #offers, 2 do
    local decoded, offer = pcall(cjson.decode, offers[k + 1])
    if not decoded or server_ms() > offer.until_ms then redis.call('HDEL', P .. 'offers', offers[k]) end
  end
end

local function waited_ms(id)
  local submitted = tonumber(redis.call('HGET', P .. 'job:' .. id, 'sub_ms') or nil)
  return submitted and math.max(0, now - submitted) or 0
end

-- The number of jobs that dead workers had, and the longest wait since their submits.
local function count_left(model)
  local num, oldest = 0, 0
  for lane = 0, 7 do
    local queue = P .. 'q:' .. model .. ':' .. lane
    local summary = redis.call('EXISTS', queue) == 1 and redis.pcall('XPENDING', queue, GROUP) or {}
    for k, consumer in ipairs(not summary.err and summary[4] or {}) do
      local name = consumer[1]
      if k <= MAX_CONSUMERS and string.sub(name, 1, 1) ~= '_' and redis.call('EXISTS', P .. 'w:' .. name) == 0 then
        num = num + tonumber(consumer[2])
        local first = redis.call('XPENDING', queue, GROUP, '-', '+', 1, name)[1]
        local got = first and redis.call('XRANGE', queue, first[1], first[1])[1]
        local id = got and read_entry(got[2])
        if id then oldest = math.max(oldest, waited_ms(id)) end
      end
    end
  end
  return num, oldest
end

local function left_by_dead(model)
  local num, oldest = string.match(redis.call('HGET', P .. 'left', model) or '', '^(%d+) (%d+)$')
  if num then return tonumber(num), tonumber(oldest) end
  num, oldest = count_left(model)
  redis.call('HSET', P .. 'left', model, num .. ' ' .. whole(oldest))
  if redis.call('PTTL', P .. 'left') < 0 then redis.call('PEXPIRE', P .. 'left', COUNTED_MS) end
  return num, oldest
end

if redis.call('EXISTS', P .. 'serving') == 0 then count_workers() end
local rows, waits = {}, {}
for i = 9, #ARGV do
  local model = ARGV[i]
  local num, oldest = 0, 0
  local workers = tonumber(redis.call('HGET', P .. 'serving', model) or '0')
  if trusts_leases and redis.call('HEXISTS', P .. 'paused', model) == 0 then
    local listed = P .. 'queued:model:' .. model
    num = redis.call('ZCARD', listed)
    local first = redis.call('ZRANGE', listed, 0, 0)[1]
    if first then oldest = waited_ms(first) end
    if workers == 0 then
      local lost, lost_ms = left_by_dead(model)
      num, oldest = num + lost, math.max(oldest, lost_ms)
    end
  end
  local holder, drains = claim_of(model)
  if holder == wid then
    if claimed == model then
      redis.call('PEXPIRE', P .. 'swap:' .. model, life_ms)
    else
      redis.call('DEL', P .. 'swap:' .. model)  -- it serves it, could not load it, or left it to another
    end
    holder = nil
  end
  rows[#rows + 1] = {num, math.floor(oldest), workers, holder and (drains and 2 or 1) or 0}
  waits[model] = claimed == model and swap_ms or math.max(0, bound_ms - oldest) + swap_ms
end
redis.call('HSET', P .. 'offers', wid,
  cjson.encode({until_ms = server_ms() + tonumber(life_ms), waits_ms = waits, loading = claimed, failed = ARGV[8]}))
redis.call('PEXPIRE', P .. 'offers', life_ms)
return rows
