-- pull: delivers new entries to this worker while it has a free slot, and claims each, in one step.
-- ARGV: 3 worker, 4 free slots, 5 max crashes, 6 ms for which jobs beyond this worker's portion
--   are deferred to others (lib/portion.lua), 7 ms for which a worker that pulled counts among those,
--   8 ms for which a job is left to a worker that holds its prefix (lib/affinity.lua; 0: not at all);
--   9.. queues, the first lane at the front
-- A job takes a slot for each of its choices. The last one taken may have more of them than slots
-- were left: its choices cannot be divided, and it must not wait for narrower ones.
-- Returns {'OK', claims, more, last, deferred, left}: `claims` as lib/claim.lua gives them, `more` = 1 when the
--   sweep stopped at its own bound, `last` the newest entry of each queue when slots are left and all
--   entries have been delivered or deferred (the worker then waits for later entries),
--   `deferred` the ms after which the deferred ones may be taken, 0 without any, `left` likewise of those left to
--   workers that hold their prefixes; then 1 when some queues were left out by an operator's order
--   (lib/orders.lua), 2 when all were, else 0; {'NOLEASE'} without a lease (a thawed worker must send a
--   heartbeat first).
-- Lanes are taken in order, but every 8th job that a worker takes is the oldest that waits in any of
-- them: no lane starves another.
-- A lost reply leaves claimed entries in the worker's pending list: reconcile claims them again.
-- The first write is refused above maxmemory, before anything is delivered: a full Redis starts
-- no new work, and running jobs can end.
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
--@include lib/delivered.lua
--@include lib/portion.lua
--@include lib/affinity.lua
--@include lib/orders.lua
local wid, left, max_crashes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local defer_ms, asking_ms, affinity_ms = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local queues = {}
for i = 9, #ARGV do queues[#queues + 1] = ARGV[i] end
local MAX_ROUNDS, OLDEST_EVERY = 64, 8
local lease = P .. 'w:' .. wid
if redis.call('EXISTS', lease) == 0 then return {'NOLEASE'} end
redis.call('HSET', lease, 'pull_ms', whole(server_ms()))
local all = queues
local is_held
queues, is_held = open_queues(wid, all)
local taken = tonumber(redis.call('HGET', lease, 'taken') or '0')
local claims, rounds = {}, 0
local division = division_of(wid, queues, defer_ms, asking_ms)
local may = division and division.may or math.huge  -- jobs
local left_ms = 0  -- until jobs that are left to other workers for their prefixes may be taken

-- Claims an entry that is in this worker's pending list.
local function start(queue, entry, fields, placed)
  local id, choices = read_entry(fields)
  local result = id and claim(id, queue, entry, wid, false, max_crashes, true, placed) or {'GONE'}
  if not id then drop_entry(queue, entry) end
  if result[1] == 'OK' then
    claims[#claims + 1] = result
    left, may, taken = left - choices, may - 1, taken + 1
  elseif result[1] == 'NEWER' or result[1] == 'WAITS' then
    redis.call('XCLAIM', queue, GROUP, RELEASED, 0, entry, 'JUSTID')
  elseif result[1] == 'HELD' and result[2] ~= wid then
    redis.call('XCLAIM', queue, GROUP, result[2], 0, entry, 'JUSTID')
  end
end

-- Delivers and claims up to `count`; returns the newest entry delivered, or nil: the queue is empty.
local function take(queue, count)
  local got = redis.call('XREADGROUP', 'GROUP', GROUP, wid, 'COUNT', count, 'STREAMS', queue, '>')
  if not got or not got[1] then return nil end
  rounds = rounds + 1
  local newest
  for _, item in ipairs(got[1][2]) do
    newest = item[1]
    start(queue, newest, item[2])
  end
  return newest
end

-- The number of entries after the newest delivered one that the free slots take.
local function fitting(queue, newest)
  local places = 0
  local waiting = redis.call('XRANGE', queue, '(' .. newest, '+', 'COUNT', left)
  for k, item in ipairs(waiting) do
    local _, choices = read_entry(item[2])
    places = places + choices
    if places >= left then return k end
  end
  return #waiting
end

local function take_oldest()
  local oldest, head
  for _, queue in ipairs(queues) do
    local first = redis.call('XRANGE', queue, '(' .. last_delivered(queue), '+', 'COUNT', 1)[1]
    if first and (not head or is_after(head, first[1])) then oldest, head = queue, first[1] end
  end
  if oldest then take(oldest, 1) end
end

-- False: stopped at MAX_ROUNDS, there may be more.
local function sweep()
  for _, queue in ipairs(queues) do
    local count = 1
    while left > 0 and may > 0 and count > 0 do
      if rounds >= MAX_ROUNDS then return false end
      local until_oldest = OLDEST_EVERY - 1 - taken % OLDEST_EVERY
      if until_oldest == 0 then
        take_oldest()
        until_oldest, count = OLDEST_EVERY - 1, 1
      end
      if left > 0 and may > 0 then
        local newest = take(queue, math.min(count, until_oldest, may))
        count = newest and left > 0 and fitting(queue, newest) or 0
      end
    end
  end
  return true
end

-- As `sweep`, for jobs that have prefixes: passes over those that are left to another worker, and claims
-- what follows ahead of them.
local function sweep_by_prefix()
  local place = placement(wid, division, affinity_ms)
  local windows, is_whole = {}, true

  -- The entries after the last delivered one: those that the free slots take, if these are all too old to be
  -- left to another worker, else as many as one pull takes at most.
  local function waiting(queue, last, ahead)
    local fewest, items = left, nil
    for _ in pairs(ahead) do fewest = fewest + 1 end
    for _, count in ipairs({math.min(fewest, MAX_ROUNDS), MAX_ROUNDS}) do
      items = redis.call('XRANGE', queue, '(' .. last, '+', 'COUNT', count)
      local newest = items[count]
      if not newest then return items end
      if server_ms() - tonumber(string.match(newest[1], '^%d+')) >= affinity_ms then break end
    end
    is_whole = false
    return items
  end

  for _, queue in ipairs(division.lanes) do
    local last, ahead = delivered_and_ahead(queue)
    local window = {queue = queue}
    for _, item in ipairs(waiting(queue, last, ahead)) do
      if not ahead[item[1]] then window[#window + 1] = item end
    end
    windows[#windows + 1] = window
  end

  -- Whether this worker may take the item now.
  local function is_open(item)
    local placed, ms = place(item)
    if placed and (placed ~= 'any' or may > 0) then return placed end
    if ms then left_ms = left_ms > 0 and math.min(left_ms, math.ceil(ms)) or math.ceil(ms) end
    return nil
  end

  local function take_item(window, k, placed)
    local item = table.remove(window, k)
    redis.call('XCLAIM', window.queue, GROUP, wid, 0, item[1], 'FORCE', 'JUSTID')
    rounds = rounds + 1
    start(window.queue, item[1], item[2], placed)
  end

  local function first_open(window)
    for k, item in ipairs(window) do
      local placed = is_open(item)
      if placed then return k, placed end
    end
  end

  local function take_oldest_open()
    local oldest, at, why
    for _, window in ipairs(windows) do
      local k, placed = first_open(window)
      if k and (not oldest or is_after(oldest[at][1], window[k][1])) then oldest, at, why = window, k, placed end
    end
    if oldest then take_item(oldest, at, why) end
  end

  for _, window in ipairs(windows) do
    local k, placed = first_open(window)
    while left > 0 and k and rounds < MAX_ROUNDS do
      if taken % OLDEST_EVERY == OLDEST_EVERY - 1 then
        take_oldest_open()
      else
        take_item(window, k, placed)
      end
      k, placed = first_open(window)
    end
  end
  for _, window in ipairs(windows) do delivered_and_ahead(window.queue) end
  return rounds < MAX_ROUNDS and (is_whole or rounds == 0)
end

local is_by_prefix = division and affinity_ms > 0
local is_done
if is_by_prefix then is_done = sweep_by_prefix() else is_done = sweep() end
if #claims > 0 then redis.call('HSET', lease, 'taken', taken) end
-- Full: no job is deferred to it until it pulls again.
if left <= 0 or #queues == 0 then redis.call('HDEL', lease, 'pull_ms') end
local last = {}
if is_done and left > 0 then
  for k, queue in ipairs(all) do
    local newest = redis.call('XREVRANGE', queue, '+', '-', 'COUNT', 1)
    last[k] = newest[1] and newest[1][1] or '0-0'
  end
end
return {'OK', claims, is_done and 0 or 1, last, may <= 0 and division and math.ceil(division.ms) or 0, left_ms,
  not is_held and 0 or #queues > 0 and 1 or 2}
