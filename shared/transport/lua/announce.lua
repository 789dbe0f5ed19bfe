-- announce: publish a model's card and keep it, its blobs and its queues alive.
-- ARGV: 3 model, 4 card, 5 life_ms, 6 blob_life_ms, 7 number of queues q, then q queues, then blob digests
-- Returns the digests that are not stored. If there are any, nothing is published: the caller sets
-- them and announces again. So a card is never visible before its blobs.
-- Cards that were not announced or kept (see keep.lua) for `life_ms` are dropped here, so the hash stays
-- bounded.
--@include lib/common.lua
local model, life_ms = ARGV[3], tonumber(ARGV[5])
local num_queues = tonumber(ARGV[7])
local now = server_ms()  -- as readers of these times have it; live models announce again at once
-- First, because it is never refused above maxmemory.
redis.call('PEXPIRE', P .. 'models', whole(life_ms))
local missing = {}
for i = 8 + num_queues, #ARGV do
  if redis.call('PEXPIRE', P .. 'blob:' .. ARGV[i], ARGV[6]) == 0 then
    missing[#missing + 1] = ARGV[i]
  end
end
if #missing > 0 then return missing end
redis.call('ZREMRANGEBYSCORE', P .. 'models_kept', '-inf', whole(now))
redis.call('HSET', P .. 'models', model, ARGV[4])
redis.call('ZADD', P .. 'models_seen', whole(now), model)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', P .. 'models_seen', '-inf', whole(now - life_ms))) do
  if not redis.call('ZSCORE', P .. 'models_kept', old) then
    redis.call('HDEL', P .. 'models', old)
    redis.call('ZREM', P .. 'models_seen', old)
  end
end
redis.call('PEXPIRE', P .. 'models', whole(life_ms))
redis.call('PEXPIRE', P .. 'models_seen', whole(life_ms))
for i = 8, 7 + num_queues do
  if redis.call('EXISTS', ARGV[i]) == 1 then expire_at_least(ARGV[i], life_ms) end
end
return missing
