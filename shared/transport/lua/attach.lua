-- attach: adds readers, or renews them (every two seconds, while they read).
-- ARGV: 3 frontend lease ms, then job id and reader ("<frontend>#<n>") of each
-- Returns one reply per reader: the job's state, or 'gone'. Idempotent.
-- A connected reader stops the orphan clock. The mark (`fe`) names the reader whose leaving starts it: it
-- stays with a reader whose frontend lives, and the next one that attaches takes it over from a reader
-- that has left or whose frontend has died.
--@include lib/common.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
local function attach(id, reader)
  local job_key = P .. 'job:' .. id
  local job = redis.call('HMGET', job_key, 'state', 'fe', 'orphan_ms')
  if not job[1] then return 'gone' end
  if TERMINAL[job[1]] or (job[2] == reader and not job[3]) then return job[1] end
  -- First, because it is never refused above maxmemory, and then the rest may be written too.
  redis.call('HDEL', job_key, 'orphan_ms')
  if job[3] or not is_alive(job[2]) then redis.call('HSET', job_key, 'fe', reader) end
  return job[1]
end

local states, frontends = {}, {}
for i = 4, #ARGV, 2 do
  states[#states + 1] = attach(ARGV[i], ARGV[i + 1])
  frontends[frontend_of(ARGV[i + 1]) or ''] = true
end
-- A frontend that attaches is alive: without this its jobs could look orphaned before its first heartbeat.
for frontend in pairs(frontends) do
  local lease = P .. 'f:' .. frontend
  if frontend ~= '' and redis.call('EXISTS', lease) == 0 then
    redis.call('DEL', lease)  -- as above: never refused
    redis.call('SET', lease, ARGV[3], 'PX', ARGV[3])
  end
end
return states
