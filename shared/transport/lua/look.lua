-- look: returns jobs' states, for readers without events for a while. Changes nothing.
-- ARGV: 3.. ids
-- Returns one reply per job: '<state> <tokens logged>-<bytes logged>', or 'gone'.
--@include lib/common.lua
local found = {}
for i = 3, #ARGV do
  local job = redis.call('HMGET', P .. 'job:' .. ARGV[i], 'state', 'n', 'b')
  found[#found + 1] = job[1] and job[1] .. ' ' .. (job[2] or '0') .. '-' .. (job[3] or '0') or 'gone'
end
return found
