-- position: how many queued jobs go before this one. Reads only.
-- ARGV: 3 id, 4 most entries counted per lane
-- Returns the number, or -1 when the job is not queued.
-- Counted in the streams behind the group's last delivery: their length would count running jobs too.
--@include lib/common.lua
local job = redis.call('HMGET', P .. 'job:' .. ARGV[3], 'state', 'q', 'qid', 'model')
if job[1] ~= 'queued' then return -1 end

local function last_delivered(queue)
  local groups = redis.pcall('XINFO', 'GROUPS', queue)
  if groups.err then return '0-0' end
  for _, group in ipairs(groups) do
    local name, last
    for k = 1, #group, 2 do
      if group[k] == 'name' then name = group[k + 1] end
      if group[k] == 'last-delivered-id' then last = group[k + 1] end
    end
    if name == GROUP then return last end
  end
  return '0-0'
end

local function waiting(queue, before)
  local last = last_delivered(queue)
  local from = last == '0-0' and '-' or '(' .. last
  return #redis.call('XRANGE', queue, from, before, 'COUNT', ARGV[4])
end

local function id_parts(entry)
  local ms, seq = string.match(entry, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

local last_ms, last_seq = id_parts(last_delivered(job[2]))
local own_ms, own_seq = id_parts(job[3])
-- Delivered once and given back: released jobs go before new ones.
if own_ms < last_ms or (own_ms == last_ms and own_seq <= last_seq) then return 0 end

local ahead = 0
for lane = 0, 7 do
  local queue = P .. 'q:' .. job[4] .. ':' .. lane
  if queue == job[2] then return ahead + waiting(queue, '(' .. job[3]) end
  if redis.call('EXISTS', queue) == 1 then ahead = ahead + waiting(queue, '+') end
end
return ahead
