-- renew: restarts the retention of ended jobs that have their own.
-- ARGV: 3... ids
-- Returns how many. Idempotent.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/parts.lua
local renewed = 0
for i = 3, #ARGV do
  local id = ARGV[i]
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'retain_ms', 'tenant', 'held', 'kept_until_ms')
  if TERMINAL[job[1]] and job[2] then
    for _, kind in ipairs({'job:', 'log:', 'facts:'}) do redis.call('PEXPIRE', P .. kind .. id, job[2]) end
    local index = index_of(id)
    if index then keep_parts(job[3], index, tonumber(job[2])) end
    local gone_ms = job[4] and keep_held_for(job[3], tonumber(job[4]), job[5], tonumber(job[2]))
    if gone_ms then redis.call('HSET', P .. 'job:' .. id, 'kept_until_ms', gone_ms) end
    renewed = renewed + 1
  end
end
return renewed
