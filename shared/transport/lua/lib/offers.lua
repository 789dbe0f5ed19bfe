-- Models that workers load when their jobs wait. `offers`: worker -> JSON of a worker with several models,
-- renewed while it lives; `swap:<model>`: the worker that is about to serve it, while it drains and loads.

-- The number of workers other than `wid` that serve each model and take jobs.
local function serving_workers(wid)
  local serving = {}
  local known = redis.call('HGETALL', P .. 'workers')
  for k = 1, #known, 2 do
    local lease = known[k] ~= wid and redis.call('HMGET', P .. 'w:' .. known[k], 'beat_ms', 'draining')
    local decoded, models = pcall(cjson.decode, known[k + 1])
    if lease and lease[1] and lease[2] ~= '1' and decoded then
      for _, model in ipairs(models) do serving[model] = (serving[model] or 0) + 1 end
    end
  end
  return serving
end
