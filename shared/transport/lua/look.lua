-- look: returns jobs' states, for readers without events for a while. Changes nothing.
-- ARGV: 3.. ids
-- Returns one reply per job: '<state> <tokens logged>-<bytes logged>', with ' <attempt> <cause>' of the claim
--   that ended where no worker has the job (lib/between.lua), or 'gone'.
--@include lib/common.lua
--@include lib/pulse.lua
--@include lib/between.lua
local found = {}
for i = 3, #ARGV do
  local job = redis.call('HMGET', P .. 'job:' .. ARGV[i], 'state', 'n', 'b', 'owner', 'attempt', 'ends')
  local reply = 'gone'
  if job[1] then
    reply = job[1] .. ' ' .. (job[2] or '0') .. '-' .. (job[3] or '0')
    if is_between(job[1], job[4], job[5]) then
      -- An older release notes no end of a claim that was given back.
      local noted = job[1] == 'queued' and (string.match(job[6] or '', '([^|\n]+)$') or 'released')
      reply = table.concat({reply, job[5], noted or 'worker_lost'}, ' ')
    end
  end
  found[#found + 1] = reply
end
return found
