-- reap: ends jobs past their deadline, queued or running, jobs that no worker claimed within their queue
-- timeout, and jobs without a reader. Every frontend and worker may call it at any time.
-- ARGV: 3 testimony (lib/pulse.lua)
-- Returns what `pulse` returns, and the number of jobs that this call ended.
-- Orphans are looked for in one page of the live jobs per call, the next page each time: a job that
-- waits in the queue has no other caller that would notice the death of its frontend.
-- What an older release submitted or moved is listed there too, where this release looks for it.
-- When no job is live the gauges are set to zero: a job whose hash expired unreaped (no process ran
-- for a day) cannot be counted back one by one. When no batch is open either, no deadline needs a
-- continuous time: it is the server's clock again.
--@include lib/common.lua
--@include lib/allowance.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
--@include lib/latch.lua
--@include lib/pulse.lua
--@include lib/orphan.lua
--@include lib/history.lua
--@include lib/orders.lua
local PAGE, TENANTS = 100, 16
local ended = 0
local seen = pulse(ARGV[3])
local due = redis.call('ZRANGEBYSCORE', P .. 'live', '-inf', whole(now_ms()), 'LIMIT', 0, PAGE)
for _, id in ipairs(due) do
  local state = redis.call('HGET', P .. 'job:' .. id, 'state')
  if state and not TERMINAL[state] then
    latch(id, {state = 'expired', reason = 'deadline_exceeded', by = 'reaper'})
    ended = ended + 1
  else
    redis.call('ZREM', P .. 'live', id)
  end
end

-- After the deadlines: of a job that has passed both it is the deadline that ends it, as at its claim.
local waited = redis.call('ZRANGEBYSCORE', P .. 'unbegun', '-inf', whole(now_ms()), 'LIMIT', 0, PAGE)
for _, id in ipairs(waited) do
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'attempt')
  if job[1] and not TERMINAL[job[1]] and job[2] == '0' then
    latch(id, {state = 'expired', reason = 'queue_timeout', by = 'reaper'})
    ended = ended + 1
  else
    redis.call('ZREM', P .. 'unbegun', id)
  end
end

-- By rank. Jobs that end elsewhere move later ones down: a job skipped by that is met next time.
local from = math.max(0, tonumber(redis.call('HGET', P .. 'pulse', 'swept') or '0') - ended)
local page = redis.call('ZRANGE', P .. 'live', from, from + PAGE - 1)
local to = from + #page
for _, id in ipairs(page) do
  local job = redis.call('HMGET', P .. 'job:' .. id, 'state', 'fe', 'orphan_ms', 'og')
  local is_live = job[1] and not TERMINAL[job[1]]
  if is_live and orphaned(id, job[2], job[3], job[4]) then
    latch(id, {state = 'cancelled', reason = 'orphaned', by = 'reaper'})
    ended, to = ended + 1, to - 1
  elseif is_live and not redis.call('ZSCORE', P .. job[1], id) then
    local fields = read_job(id, 'tenant', 'model', 'deadline_ms')
    unlist_job(id, fields, job[1] == 'queued' and 'running' or 'queued')
    list_job(id, fields, job[1])
  end
end
redis.call('HSET', P .. 'pulse', 'swept', #page == PAGE and to or 0)

if redis.call('EXISTS', P .. 'live') == 0 then
  if redis.call('EXISTS', P .. 'batches_open') == 0 then redis.call('HDEL', P .. 'pulse', 'skew_ms') end
  local was_wrong = redis.call('DEL', P .. 'queued', P .. 'running') > 0
  for _, gauge in ipairs({'queued', 'running', 'queued_tokens'}) do
    local value = redis.call('HGET', P .. 'stat', gauge)
    if value and value ~= '0' then
      redis.call('HSET', P .. 'stat', gauge, 0)
      was_wrong = true
    end
  end
  for _, model in ipairs(was_wrong and redis.call('HKEYS', P .. 'models') or {}) do
    redis.call('HDEL', P .. 'work:' .. model, '0', '1', '2', '3', '4', '5', '6', '7')
    redis.call('DEL', P .. 'queued:model:' .. model)
  end
  -- What the lost jobs held is gone with them; the rest is kept.
  for _, tenant in ipairs(was_wrong and redis.call('HKEYS', P .. 'held') or {}) do
    local bytes, kept = 0, redis.call('HGETALL', P .. 'kept:' .. tenant)
    for k = 2, #kept, 2 do bytes = bytes + tonumber(kept[k]) end
    redis.call('HSET', P .. 'held', tenant, whole(bytes))
    if bytes == 0 then redis.call('HDEL', P .. 'held', tenant) end
  end
end

-- The memory that Redis uses now; admission adds later bytes. Its commands since it started. And whether
-- its last writes to the disk succeeded: 1 or 0.
local function sample_store()
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' then return end  -- the access list forbids it: only maxmemory itself holds
  local function number(name) return tonumber(string.match(info, name .. ':(%d+)') or '0') end
  redis.call('HSET', P .. 'stat', 'store_limit', whole(number('maxmemory')), 'store_grown', 0,
    'store_used', whole(math.max(0, number('used_memory') - number('mem_not_counted_for_evict'))))
  info = redis.call('INFO', 'stats')
  redis.call('HSET', P .. 'stat', 'store_commands', whole(number('total_commands_processed')))
  info = redis.call('INFO', 'persistence')
  local function is_ok(name) return string.find(info, name .. ':ok', 1, true) and 1 or 0 end
  redis.call('HSET', P .. 'stat', 'disk_aof', number('aof_enabled'), 'disk_aof_bytes',
    whole(number('aof_current_size')), 'disk_ok_aof_write', is_ok('aof_last_write_status'),
    'disk_ok_aof_rewrite', is_ok('aof_last_bgrewrite_status'), 'disk_ok_rdb_save', is_ok('rdb_last_bgsave_status'))
end

-- Makes room before it is short. The bytes are estimates: the next sample shows what they were.
local function evict_oldest()
  local store = redis.call('HMGET', P .. 'stat', 'store_limit', 'store_used')
  local limit = tonumber(store[1] or '0')
  local excess = tonumber(store[2] or '0') - limit * EVICT_AT
  if limit > 0 and excess > 0 then evict(excess, EVICTED_PER_CALL) end
end

sample_store()
evict_oldest()
for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', P .. 'kept', '-inf', whole(server_ms()), 'LIMIT', 0, TENANTS)) do
  local bytes, times, first_ms = expired_of(tenant)
  if #times > 0 then redis.call('HDEL', P .. 'kept:' .. tenant, unpack(times)) end
  if first_ms then
    redis.call('ZADD', P .. 'kept', whole(first_ms), tenant)
  else
    redis.call('ZREM', P .. 'kept', tenant)
  end
  hold(tenant, 0 - bytes)
end
expire_at_least(P .. 'paused', PAUSED_MS)
note_queue()
return {seen, ended}
