-- recover: take over released jobs and those of workers whose lease ended; bury empty dead workers.
-- ARGV: 3 worker, 4 free places (see pull.lua), 5 max crashes, 6 whether suspects are taken (0 or 1),
--   7 lane before which a job's priority must be, 8..10 where the call before stopped, 11.. queues this
--   worker serves
-- Returns {claims as lib/claim.lua gives them, where it stopped (consumer, queue, start of the next page), if
--   entries are left that it did not look at}; nothing without a lease.
-- Queues that an operator's order closes to it are left out (lib/orders.lua).
-- After an outage of Redis itself only released jobs are taken: see lib/pulse.lua.
-- A lost reply leaves the claims in this worker's own pending list: reconcile claims them again.
--
-- Jobs that were set aside for workers with other files (lib/served_by.lua) are taken by these alone. When
-- none of these is left, the next recover of any worker of the queue ends them, a page at a time.
--
-- A crash of a batching worker shows little about each of its jobs. The first is blamed on no job: all
-- are taken over. A job that was in two crashes is a suspect: a worker admits one suspect at a time and
-- names it in probe:<worker>; if that worker dies, only the named one is blamed. The one that was
-- there the fewest times is the first: the culprit must not keep the others from being cleared. A
-- worker whose device has failed takes none before the device has worked for others.
--
-- Entries that are looked at and left, suspects and jobs of later lanes, may be many: one call leaves MAX_LEFT
-- from the front, where the first lanes are, and as many from where the call before stopped.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
--@include lib/latch.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
--@include lib/dead_letter.lua
--@include lib/blame.lua
--@include lib/release.lua
--@include lib/served_by.lua
--@include lib/claim.lua
--@include lib/entry.lua
--@include lib/orders.lua
local wid, left, max_crashes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local takes_suspects = ARGV[6] == '1'
local before_lane = tonumber(ARGV[7])
local PAGE, MAX_LEFT, SUSPECT_CRASHES, PROBE_MS = 64, 256, 2, 3600000
if redis.call('EXISTS', P .. 'w:' .. wid) == 0 then return {{}, {}} end
local probe_key = P .. 'probe:' .. wid
local queues = {}
for i = 11, #ARGV do queues[#queues + 1] = ARGV[i] end
local open = open_queues(wid, queues)
local is_open = {}
for _, queue in ipairs(open) do is_open[queue] = true end
local claims = {}
local mildest  -- of the suspects: the one with the fewest crashes and losses

local function take_over(id, queue, entry, choices, blamed, suspect)
  redis.call('XCLAIM', queue, GROUP, wid, 0, entry, 'JUSTID')
  if suspect then redis.call('SET', probe_key, id, 'PX', PROBE_MS) end
  local result = claim(id, queue, entry, wid, blamed, max_crashes)
  if result[1] == 'OK' then
    claims[#claims + 1] = result
    left = left - choices
    return
  end
  if result[1] == 'WAITS' then redis.call('XCLAIM', queue, GROUP, RELEASED, 0, entry, 'JUSTID') end
  if suspect and redis.call('GET', probe_key) == id then redis.call('DEL', probe_key) end
end

-- Looks at an entry of a place (see below). True: it was left there.
local function take(place, entry)
  local queue, is_dead = place.queue, place.is_dead
  local got = redis.call('XRANGE', queue, entry, entry)
  if #got == 0 then redis.call('XACK', queue, GROUP, entry); return false end
  local id, choices = read_entry(got[1][2])
  if not id then drop_entry(queue, entry); return false end
  local job = redis.call('HMGET', P .. 'job:' .. id, 'crashes', 'v', 'losses', 'lane')
  if tonumber(job[4] or '0') >= before_lane then return true end
  if tonumber(job[2] or '1') > SCHEMA_VERSION then
    if is_dead then redis.call('XCLAIM', queue, GROUP, RELEASED, 0, entry, 'JUSTID') end
    return not is_dead
  end
  local named = redis.call('GET', P .. 'probe:' .. place.consumer)
  local blamed = is_dead and (not named or named == id)
  local crashes = tonumber(job[1] or '0') + (blamed and 1 or 0)
  local losses = tonumber(job[3] or '0')
  if crashes < max_crashes and math.max(crashes, losses) >= SUSPECT_CRASHES then
    local harm = crashes + losses
    if not mildest or harm < mildest.harm then
      mildest = {id = id, queue = queue, entry = entry, choices = choices, blamed = blamed, harm = harm}
    end
    return true
  end
  take_over(id, queue, entry, choices, blamed, false)
  return false
end

-- The pending lists to take from: consumer, queue, and whether the consumer is a dead worker.
local places = {}
local function add_places(consumer, is_dead)
  for _, queue in ipairs(open) do
    if redis.call('EXISTS', queue) == 1 then
      places[#places + 1] = {consumer = consumer, queue = queue, is_dead = is_dead}
    end
  end
end

-- Takes from the place `at` on, its page `from` first, while jobs fit and until MAX_LEFT entries were left.
-- Returns the place and the page where it stopped; nil: it has looked at all.
local function walk(at, from)
  local num_left = 0
  for k = at, #places do
    local place, is_last = places[k], false
    while not is_last do
      local page = redis.call('XPENDING', place.queue, GROUP, from, '+', PAGE, place.consumer)
      is_last = #page < PAGE
      for _, pending in ipairs(page) do
        if left <= 0 or num_left == MAX_LEFT then return k, from end
        if take(place, pending[1]) then num_left = num_left + 1 end
        from = '(' .. pending[1]
      end
    end
    from = '-'
  end
end

-- DELCONSUMER silently drops pending entries: only when provably empty.
local function bury(dead, models)
  local left = 0
  local decoded, list = pcall(cjson.decode, models)
  if not decoded then list = {} end
  for _, model in ipairs(list) do
    for lane = 0, 7 do
      local queue = P .. 'q:' .. model .. ':' .. lane
      local pending = redis.call('EXISTS', queue) == 1
        and redis.pcall('XPENDING', queue, GROUP, '-', '+', 1, dead) or {}
      if not pending.err then
        if #pending > 0 then left = left + 1
        elseif redis.call('EXISTS', queue) == 1 then
          redis.pcall('XGROUP', 'DELCONSUMER', queue, GROUP, dead)
        end
      end
    end
  end
  if left == 0 then
    redis.call('DEL', P .. 'probe:' .. dead, P .. 'order:' .. dead)
    redis.call('HDEL', P .. 'workers', dead)
  end
end

-- Ends a page of the jobs that were set aside for workers that no longer exist.
local function end_aside(queue, consumer)
  for _, pending in ipairs(redis.call('XPENDING', queue, GROUP, '-', '+', PAGE, consumer)) do
    local got = redis.call('XRANGE', queue, pending[1], pending[1])
    local id = #got > 0 and read_entry(got[1][2])
    local state = id and redis.call('HGET', P .. 'job:' .. id, 'state')
    if state and not TERMINAL[state] then
      latch(id, {state = 'failed', reason = 'model_replaced', by = wid})
    else
      drop_entry(queue, pending[1])
    end
  end
end

-- Ends jobs that were set aside for workers of which none is left, and forgets a `need` of which none is left.
local function settle_aside(need, is_mine)
  local consumer, is_empty = ASIDE .. need, true
  local is_over = not is_mine and not is_served(need)
  for _, queue in ipairs(queues) do
    if redis.call('EXISTS', queue) == 1 then
      if not is_open[queue] then is_empty = false elseif is_over then end_aside(queue, consumer) end
      if #redis.call('XPENDING', queue, GROUP, '-', '+', 1, consumer) > 0 then is_empty = false
      elseif is_open[queue] and (is_mine or is_over) then redis.call('XGROUP', 'DELCONSUMER', queue, GROUP, consumer) end
    end
  end
  if is_empty and (is_mine or is_over) then redis.call('SREM', P .. 'aside', need) end
end

local dead_models, dead = {}, {}
pulse()
local seen = leases_mean_nothing() and {} or redis.call('HGETALL', P .. 'workers')
for k = 1, #seen, 2 do
  local lease = P .. 'w:' .. seen[k]
  if not lease_runs(lease, tonumber(redis.call('HGET', lease, 'lease_ms') or nil)) then
    dead[#dead + 1] = seen[k]
    dead_models[seen[k]] = seen[k + 1]
  end
end
table.sort(dead)
add_places(RELEASED, false)
for _, consumer in ipairs(dead) do add_places(consumer, true) end
local aside = redis.call('SMEMBERS', P .. 'aside')
local is_mine = {}
for _, need in ipairs(aside) do
  is_mine[need] = fits(wid, need)
  if is_mine[need] then add_places(ASIDE .. need, false) end
end
local at, from = walk(1, '-')
if at then
  for k, place in ipairs(places) do
    if place.consumer == ARGV[8] and place.queue == ARGV[9] then at, from = k, ARGV[10] end
  end
  at, from = walk(at, from)
end
for _, consumer in ipairs(dead) do bury(consumer, dead_models[consumer]) end
for _, need in ipairs(aside) do settle_aside(need, is_mine[need]) end
if mildest and takes_suspects and left > 0 and redis.call('EXISTS', probe_key) == 0 then
  take_over(mildest.id, mildest.queue, mildest.entry, mildest.choices, mildest.blamed, true)
end
return {claims, at and {places[at].consumer, places[at].queue, from} or {}}
