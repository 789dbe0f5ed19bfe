-- Needs lib/delivered.lua, lib/entry.lua and lib/portion.lua. A waiting job goes first to the worker whose prefix
-- cache holds the longest part of its prompt. It is left to that worker for `affinity_ms` after its submit, if it
-- has pulled lately and holds few enough jobs; then any worker takes it, whatever its portion: else the job would
-- wait for a second worker after the first.
-- Jobs are thus claimed ahead of older ones: in a stream, before the group's last delivered entry has come to
-- them. The group delivers them again, to a worker that then finds them claimed (`HELD` in lib/claim.lua).
-- One table, because Lua allows few locals. `compared`: jobs whose prefixes one pull compares at most; the others
-- are for the next, `again_ms` later. `comparisons`: of a job and a worker, in one pull.
local AFFINITY = {digest_bytes = 8, ahead = 64, compared = 32, again_ms = 10, comparisons = 512}

-- The group's last delivered entry, and a set of the entries after it that were claimed ahead. Moves the group
-- past those that directly follow it.
local function delivered_and_ahead(queue)
  local last, ahead, passed = last_delivered(queue), {}, nil
  local claimed = redis.call('XPENDING', queue, GROUP, '(' .. last, '+', AFFINITY.ahead)
  if #claimed == 0 then return last, ahead end
  for _, pending in ipairs(claimed) do ahead[pending[1]] = true end
  for _, item in ipairs(redis.call('XRANGE', queue, '(' .. last, '+', 'COUNT', #claimed)) do
    if not ahead[item[1]] then break end
    passed = item[1]
  end
  if passed then redis.call('XGROUP', 'SETID', queue, GROUP, passed) end
  return passed or last, ahead
end

-- How many of these digests, the shortest prefix first, the worker's cache holds in a row.
local function held_of(wid, digests)
  local held = 0
  for _, is_held in ipairs(redis.call('SMISMEMBER', P .. 'prefixes:' .. wid, unpack(digests))) do
    if is_held == 0 then break end
    held = held + 1
  end
  return held
end

local function split_digests(joined)
  local digests = {}
  for at = 1, #joined, AFFINITY.digest_bytes do digests[#digests + 1] = string.sub(joined, at, at + AFFINITY.digest_bytes - 1) end
  return digests
end

-- The worker of `holds` (worker -> jobs, each below `most`) with the longest part of the prefix; of several the one with the
-- fewest jobs, `wid` where it is one of these, else the first by name. nil: none holds any of it.
local function best_holder(wid, digests, holds, most)
  local best, longest = nil, 0
  local function is_before(worker)
    if holds[worker] ~= holds[best] then return holds[worker] < holds[best] end
    return worker == wid or (best ~= wid and worker < best)
  end
  for worker, jobs in pairs(holds) do
    local length = jobs < most and held_of(worker, digests) or 0
    if length > longest or (length > 0 and length == longest and is_before(worker)) then
      best, longest = worker, length
    end
  end
  return best
end

-- Where the jobs go that wait in one pull. `division`: lib/portion.lua.
-- Returns a function of a queue's item: 'prefix', 'late' or 'any' for one that this worker may take, as the job's
-- record names it ('any': within its portion), else nil and the ms for which it is left to another worker.
local function placement(wid, division, affinity_ms)
  local holds, known, compared, num_workers = division.holds, {}, 0, 0
  local most = math.ceil(division.level * 1.25) + 1
  for _ in pairs(holds) do num_workers = num_workers + 1 end
  local max_compared = math.max(1, math.min(AFFINITY.compared, math.floor(AFFINITY.comparisons / num_workers)))
  local function place(item)
    local joined = entry_field(item[2], 'p')
    -- Before its time: the server's clock was set back. How long it waits is not known then.
    local waits_ms = math.abs(server_ms() - tonumber(string.match(item[1], '^%d+')))
    if not joined or (waits_ms >= affinity_ms and division.may == math.huge) then return {'any'} end
    if compared >= max_compared then return {nil, AFFINITY.again_ms} end
    compared = compared + 1
    local best = best_holder(wid, split_digests(joined), holds, most)
    if not best then return {'any'} end
    if best ~= wid and waits_ms >= affinity_ms then return {'late'} end
    holds[best] = holds[best] + 1
    if best == wid then return {'prefix'} end
    return {nil, affinity_ms - waits_ms}
  end
  return function(item)
    known[item] = known[item] or place(item)  -- not by its id: two lanes may have the same one
    return known[item][1], known[item][2]
  end
end
