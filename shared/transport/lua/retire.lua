-- retire: removes a worker that stops: its jobs return to the queue without blame; its consumer, lease and
-- name are deleted.
-- ARGV: 3 worker, 4 whether it returns, for another model (0 or 1): an order to it is kept, 5.. queues it serves
-- Returns the number of jobs given back. A repeat finds nothing.
--@include lib/common.lua
--@include lib/release.lua
local wid, given = ARGV[3], 0
local PAGE = 64
redis.call('DEL', P .. 'w:' .. wid)
for i = 5, #ARGV do
  local queue = ARGV[i]
  local page = redis.call('EXISTS', queue) == 1
    and redis.pcall('XPENDING', queue, GROUP, '-', '+', PAGE, wid) or {}
  while not page.err and #page > 0 do
    for _, pending in ipairs(page) do
      local entry = pending[1]
      local got = redis.call('XRANGE', queue, entry, entry)
      local id = nil
      if #got > 0 then
        local fields = got[1][2]
        for k = 1, #fields, 2 do if fields[k] == 'id' then id = fields[k + 1] end end
      end
      local job = id and redis.call('HMGET', P .. 'job:' .. id, 'state', 'owner') or {}
      if not id then
        redis.call('XACK', queue, GROUP, entry)
      elseif job[1] == 'running' and job[2] == wid then
        release(id, queue, entry, wid)
        given = given + 1
      else
        redis.call('XCLAIM', queue, GROUP, RELEASED, 0, entry, 'JUSTID')
      end
    end
    page = redis.pcall('XPENDING', queue, GROUP, '-', '+', PAGE, wid)
  end
  if not page.err and redis.call('EXISTS', queue) == 1 then
    redis.pcall('XGROUP', 'DELCONSUMER', queue, GROUP, wid)
  end
end
redis.call('DEL', P .. 'probe:' .. wid, P .. 'prefixes:' .. wid)
if ARGV[4] ~= '1' then redis.call('DEL', P .. 'order:' .. wid) end
redis.call('HDEL', P .. 'workers', wid)
return given
