-- Needs lib/delivered.lua. Workers that pull at the same time divide the waiting jobs evenly: a burst must
-- not go to the first one. A worker's portion is the jobs it may take now; it defers the rest to the others.
-- Jobs that have waited for `defer_ms` may be taken by any worker, so a worker that pulled and then stands
-- still, or is slow, holds nothing up for longer.

-- The queues in which jobs wait, the number of these jobs, and of jobs that each worker holds of them.
local function waiting_and_held(queues)
  local lanes, waiting, held = {}, 0, {}
  for _, queue in ipairs(queues) do
    local entries = redis.call('XLEN', queue)
    if entries > 0 then
      local pending = redis.call('XPENDING', queue, GROUP)
      for _, pair in ipairs(pending[4] or {}) do
        held[pair[1]] = (held[pair[1]] or 0) + tonumber(pair[2])
      end
      if entries > pending[1] then
        lanes[#lanes + 1] = queue
        waiting = waiting + entries - pending[1]
      end
    end
  end
  return lanes, waiting, held
end

-- The number of jobs that each worker would hold at most if the waiting ones go to those that hold least.
local function even_level(holds, waiting)
  local sorted, sum = {}, waiting
  for _, held in pairs(holds) do sorted[#sorted + 1] = held end
  table.sort(sorted)
  for k, held in ipairs(sorted) do
    sum = sum + held
    if not sorted[k + 1] or sum <= k * sorted[k + 1] then return math.ceil(sum / k) end
  end
end

-- The jobs that this worker holds, and each worker that serves one of these queues too and has pulled
-- lately. One that drains or is stalled takes nothing.
local function askers(wid, queues, held, asking_ms)
  local serves, named, holds = {}, redis.call('HGETALL', P .. 'workers'), {[wid] = held[wid] or 0}
  for _, queue in ipairs(queues) do serves[queue] = true end
  for k = 1, #named, 2 do
    local is_beside = false
    if named[k] ~= wid then
      local decoded, models = pcall(cjson.decode, named[k + 1])
      for _, model in ipairs(decoded and models or {}) do
        is_beside = is_beside or serves[P .. 'q:' .. model .. ':0']
      end
    end
    if is_beside then
      local lease = redis.call('HMGET', P .. 'w:' .. named[k], 'pull_ms', 'draining', 'stalled')
      local asked_ms = tonumber(lease[1] or nil)
      if asked_ms and math.abs(server_ms() - asked_ms) <= asking_ms
        and lease[2] ~= '1' and lease[3] ~= '1' then
        holds[named[k]] = held[named[k]] or 0
      end
    end
  end
  return holds
end

-- Between which workers the waiting jobs are divided: `holds`, `level`, and how many jobs this worker `may` take
-- now (math.huge: all), else after how many ms (`ms`). nil: no job waits, or no other worker is registered.
local function division_of(wid, queues, defer_ms, asking_ms)
  if redis.call('HLEN', P .. 'workers') < 2 then return nil end
  local lanes, waiting, held = waiting_and_held(queues)
  if waiting == 0 then return nil end
  local holds = askers(wid, queues, held, asking_ms)
  local level = even_level(holds, waiting)
  local all = {holds = holds, level = level, lanes = lanes, may = math.huge, ms = 0}
  local may = math.max(0, level - holds[wid])
  if may >= waiting then return all end
  local longest_ms = 0
  for _, queue in ipairs(lanes) do
    local first = redis.call('XRANGE', queue, '(' .. last_delivered(queue), '+', 'COUNT', 1)[1]
    local waits_ms = first and server_ms() - tonumber(string.match(first[1], '^%d+')) or 0
    -- Before its time: the server's clock was set back. How long it waits is not known then.
    if math.abs(waits_ms) >= defer_ms then return all end
    longest_ms = math.max(longest_ms, waits_ms)
  end
  return {holds = holds, level = level, lanes = lanes, may = may, ms = defer_ms - longest_ms}
end
