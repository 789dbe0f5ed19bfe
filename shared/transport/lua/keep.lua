-- keep: cards and text files of models stay for another `life_ms` though no worker announces them.
-- ARGV: 3 life_ms, 4 number of models m, then m models, then blob digests
-- Returns the number of these models that have a card. A model never announced has none to keep.
--@include lib/common.lua
local life_ms, num_models, num_kept = tonumber(ARGV[3]), tonumber(ARGV[4]), 0
for i = 5, 4 + num_models do
  if redis.call('HEXISTS', P .. 'models', ARGV[i]) == 1 then
    redis.call('ZADD', P .. 'models_kept', whole(server_ms() + life_ms), ARGV[i])
    num_kept = num_kept + 1
  end
end
if num_kept == 0 then return 0 end
for _, name in ipairs({'models', 'models_seen', 'models_kept'}) do expire_at_least(P .. name, life_ms) end
for i = 5 + num_models, #ARGV do
  if redis.call('EXISTS', P .. 'blob:' .. ARGV[i]) == 1 then
    expire_at_least(P .. 'blob:' .. ARGV[i], life_ms)
  end
end
return num_kept
