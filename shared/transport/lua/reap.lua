-- reap: end what is past its deadline, queued or running. Anybody may call it at any time.
-- Returns the number of jobs that this call expired; a repeat finds none.
-- When no job is live the gauges are set to zero: a job whose hash expired unreaped (nobody was there
-- for an hour) cannot be counted back one by one.
--@include lib/common.lua
--@include lib/latch.lua
--@include lib/pulse.lua
local PAGE = 100
local expired = 0
pulse()
local due = redis.call('ZRANGEBYSCORE', P .. 'live', '-inf', whole(now_ms()), 'LIMIT', 0, PAGE)
for _, id in ipairs(due) do
  local state = redis.call('HGET', P .. 'job:' .. id, 'state')
  if state and not TERMINAL[state] then
    latch(id, {state = 'expired', reason = 'deadline_exceeded', by = 'reaper'})
    expired = expired + 1
  else
    redis.call('ZREM', P .. 'live', id)
  end
end
if redis.call('EXISTS', P .. 'live') == 0 then
  for _, gauge in ipairs({'queued', 'running', 'queued_tokens'}) do
    local value = redis.call('HGET', P .. 'stat', gauge)
    if value and value ~= '0' then redis.call('HSET', P .. 'stat', gauge, 0) end
  end
end
return expired
