-- position: how many queued jobs precede each of these, and which running ones have lost their worker.
-- Reads only.
-- ARGV: 3 most entries counted per lane, then ids
-- Returns one number per id: -1 for a job that is not queued, -2 for a running one between workers.
-- Counted in the streams after the group's last delivery: their length would count running jobs too.
-- Each lane is read once, however many jobs are given.
--@include lib/common.lua
--@include lib/pulse.lua
--@include lib/between.lua
--@include lib/delivered.lua
local MAX_COUNTED = tonumber(ARGV[3])

local lanes = {}  -- by queue: last delivered entry, and up to where the lane must be read

local function lane_of(queue)
  if not lanes[queue] then lanes[queue] = {last = last_delivered(queue)} end
  return lanes[queue]
end

local function waiting(queue, to)
  local last = lane_of(queue).last
  local from = last == '0-0' and '-' or '(' .. last
  return redis.call('XRANGE', queue, from, to, 'COUNT', MAX_COUNTED)
end

-- How many entries of the lane precede this one.
local function place(queue, entry)
  local lane = lane_of(queue)
  if not lane.places then
    lane.places = {}
    for at, item in ipairs(waiting(queue, lane.to)) do lane.places[item[1]] = at - 1 end
  end
  return lane.places[entry] or MAX_COUNTED
end

local function size(queue)
  local lane = lane_of(queue)
  if not lane.size then
    lane.size = redis.call('EXISTS', queue) == 1 and #waiting(queue, '+') or 0
  end
  return lane.size
end

local jobs = {}
for i = 4, #ARGV do
  local job = redis.call('HMGET', P .. 'job:' .. ARGV[i], 'state', 'q', 'qid', 'model', 'owner', 'attempt')
  jobs[#jobs + 1] = job
  if job[1] == 'queued' then
    local lane = lane_of(job[2])
    if not lane.to or is_after(job[3], lane.to) then lane.to = job[3] end
  end
end

local positions = {}
for at, job in ipairs(jobs) do
  local position = is_between(job[1], job[5], job[6]) and -2 or -1
  if job[1] == 'queued' then
    position = 0
    -- Delivered once and given back: released jobs precede new ones.
    if is_after(job[3], lane_of(job[2]).last) then
      for lane = 0, 7 do
        local queue = P .. 'q:' .. job[4] .. ':' .. lane
        if queue == job[2] then
          position = position + place(queue, job[3])
          break
        end
        position = position + size(queue)
      end
    end
  end
  positions[at] = position
end
return positions
