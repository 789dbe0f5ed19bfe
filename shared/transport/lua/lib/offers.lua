-- Models that workers load when their jobs wait. `offers`: worker -> JSON of a worker with several models,
-- renewed while it lives. `swap:<model>`: the worker that is about to load it; 'drains:' before it while that
-- one still runs jobs of another.

-- The worker that has claimed a model (nil: none), and whether it drains.
local function claim_of(model)
  local claim = redis.call('GET', P .. 'swap:' .. model)
  if not claim then return nil, false end
  if string.sub(claim, 1, 7) == 'drains:' then return string.sub(claim, 8), true end
  return claim, false
end

-- The number of workers that serve each model and take jobs. Reads all workers.
local function count_serving()
  local serving = {}
  local known = redis.call('HGETALL', P .. 'workers')
  for k = 1, #known, 2 do
    local lease = redis.call('HMGET', P .. 'w:' .. known[k], 'beat_ms', 'draining')
    local decoded, models = pcall(cjson.decode, known[k + 1])
    if lease[1] and lease[2] ~= '1' and decoded then
      for _, model in ipairs(models) do serving[model] = (serving[model] or 0) + 1 end
    end
  end
  return serving
end
