-- How long ended jobs are kept: records and texts (log and prompt) each for their time. Until then those
-- without a time of their own (`retain_ms`) go when Redis is nearly full or their tenant has its share of it:
-- the oldest first, texts before records. The sorted sets `texts:<tenant>` and `records:<tenant>` list them by
-- the time from which they may go; `texts` and `records` list tenants by the first of these times. A text
-- leads to a record: an id is in one of them. All times are the server's clock's, by which Redis expires keys.
local DELIVERED_MS = 60000      -- until the text of a job may go whose reader left after its end
local UNDELIVERED_MS = 600000   -- until any other text may go, and any record
local EVICT_AT = 8 / 10         -- of Redis' memory
local EVICTED_PER_CALL, EVICTED_PER_SUBMIT = 100, 16
local ROOM = 2                  -- times the bytes of a submit

-- How long an ended job's record and its text are kept (ms), and why: 'setting', 'request' or 'brief'.
local function lives_of(job)
  local default_ms = tonumber(job.record_ms) or RETAIN_MS
  local own_ms = tonumber(job.retain_ms)
  if own_ms then return own_ms, own_ms, 'request', 'request' end
  if job.brief then
    local brief_ms = math.min(BRIEF_MS, default_ms)
    return brief_ms, brief_ms, 'brief', 'brief'
  end
  local text_ms = math.min(tonumber(job.text_ms) or default_ms, default_ms)
  return default_ms, text_ms, 'setting', job.own_text and 'request' or 'setting'
end

-- A tombstone shows that a job has ended whose record is gone. Redis has lost a job with neither record nor
-- tombstone, and a process that was sure of it within TOMBSTONE_MS may restore it.
-- The tombstone of an ended job: '<end>|<until>|<why>|<kind>|<tenant>'. It outlives the record by as long as the
-- record lives, by TOMBSTONE_MS at least and by an hour at most.
local TOMBSTONE_MAX_MS = 3600000

local function write_tombstone(id, job, record_ms, why)
  local more_ms = math.min(math.max(record_ms, TOMBSTONE_MS), TOMBSTONE_MAX_MS)
  redis.call('SET', P .. 'tombstone:' .. id, table.concat({job.end_ms or '', whole(server_ms() + record_ms), why,
    job.kind or '', job.tenant or ''}, '|'), 'PX', whole(record_ms + more_ms))
end

-- Lists an ended job as one whose text or record may go in `ms`; `kind`: 'texts' or 'records'.
local function list_retained(kind, id, tenant, ms, life_ms)
  local from_ms = whole(server_ms() + ms)
  redis.call('ZADD', P .. kind .. ':' .. tenant, from_ms, id)
  redis.call('ZADD', P .. kind, 'LT', from_ms, tenant)
  for _, key in ipairs({kind .. ':' .. tenant, kind}) do expire_at_least(P .. key, life_ms) end
end

-- A tenant's time is that of its first: it is written again after one has gone, and where it is not true any
-- more, because a tenant's set has expired meanwhile.
local function relist_tenant(kind, tenant)
  local first = redis.call('ZRANGE', P .. kind .. ':' .. tenant, 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', P .. kind, first[2], tenant)
  else
    redis.call('ZREM', P .. kind, tenant)
  end
end

-- A text has gone; its record may go next.
local function after_text(id, tenant)
  local left_ms = redis.call('PTTL', P .. 'job:' .. id)
  if left_ms <= 0 then return end
  local ended_ms = tonumber(redis.call('HGET', P .. 'job:' .. id, 'end_ms') or '0')
  local wait_ms = math.max(0, ended_ms + UNDELIVERED_MS - server_ms())
  list_retained('records', id, tenant, math.min(wait_ms, UNDELIVERED_MS), left_ms)
end

local function delete_text(id)
  redis.call('DEL', P .. 'log:' .. id, P .. 'prompt:' .. id)
  redis.call('ZREM', P .. 'prompts', id)
end

-- An ended job is listed no longer as one whose text or record may go.
local function unlist_retained(id, tenant)
  for _, kind in ipairs({'texts', 'records'}) do
    if redis.call('ZREM', P .. kind .. ':' .. tenant, id) == 1 then relist_tenant(kind, tenant) end
  end
end

local function delete_record(id, job)
  unlist_retained(id, job.tenant or '')
  local index = index_of(id)
  if index then release_parts(job.tenant or '', index) end
  redis.call('DEL', P .. 'job:' .. id, P .. 'facts:' .. id)
  redis.call('ZREM', P .. 'ended:' .. job.state, id)
  redis.call('ZREM', P .. 'ended:tenant:' .. (job.tenant or ''), id)
end

-- Ended jobs have few fields: an absent one is that of the record. `text_until_ms`, `log_kept_until_ms`: as
-- `until_ms`, `kept_until_ms`; `text_why`: 'setting'.
local KEPT_FIELDS = {'tenant', 'kind', 'end_ms', 'held', 'kept_until_ms', 'held_log', 'log_kept_until_ms'}

-- Counts the bytes of an ended job until new times. A job that an older release ended has all of them in `held`.
local function keep_bytes_for(id, job, record_ms, text_ms)
  if not job.held then return end
  local old_log_ms = job.log_kept_until_ms or job.kept_until_ms
  local until_ms = record_ms and keep_held_for(job.tenant, tonumber(job.held), job.kept_until_ms, record_ms)
    or job.kept_until_ms
  local log_until_ms = keep_held_for(job.tenant, tonumber(job.held_log or '0'), old_log_ms, text_ms) or old_log_ms
  redis.call('HSET', P .. 'job:' .. id, 'kept_until_ms', until_ms, 'log_kept_until_ms', log_until_ms)
end

-- Keeps an ended job for `ms` from now, its text too. It is not evicted before.
local function keep_for(id, job, ms, why)
  if why == 'batch' then unlist_retained(id, job.tenant or '') end
  for _, kind in ipairs({'job:', 'log:', 'prompt:', 'facts:'}) do redis.call('PEXPIRE', P .. kind .. id, whole(ms)) end
  local index = index_of(id)
  if index then keep_parts(job.tenant, index, ms) end
  keep_bytes_for(id, job, ms, ms)
  redis.call('HSET', P .. 'job:' .. id, 'until_ms', whole(server_ms() + ms), 'text_why', why)
  redis.call('HDEL', P .. 'job:' .. id, 'text_until_ms')
  write_tombstone(id, job, ms, why)
end

-- The reader of an ended job has all of it. The text of one that shall not be stored is kept no longer.
local function text_delivered(id, tenant)
  redis.call('ZREM', P .. 'live', id)  -- never refused above maxmemory, and then the rest may be written too
  local from_ms = whole(server_ms() + DELIVERED_MS)
  if redis.call('ZADD', P .. 'texts:' .. tenant, 'XX', 'LT', 'CH', from_ms, id) == 1 then
    redis.call('ZADD', P .. 'texts', 'LT', from_ms, tenant)
  end
  local job = read_job(id, 'own_text', 'retain_ms', unpack(KEPT_FIELDS))
  if not job.own_text or job.retain_ms or redis.call('PTTL', P .. 'log:' .. id) <= DELIVERED_MS then return end
  for _, kind in ipairs({'log:', 'prompt:'}) do redis.call('PEXPIRE', P .. kind .. id, DELIVERED_MS) end
  keep_bytes_for(id, job, nil, DELIVERED_MS)
  redis.call('HSET', P .. 'job:' .. id, 'text_until_ms', from_ms)
end

local function release_text(job)
  release_held(job.tenant, tonumber(job.held_log or '0'), job.log_kept_until_ms or job.kept_until_ms)
end

local function release_record(job)
  if job.held then release_held(job.tenant, tonumber(job.held), job.kept_until_ms) end
end

-- Evicts the first of a tenant's texts or records, if it may go. Returns bytes, or nil: none may go yet.
local function evict_first(kind, tenant)
  local first = redis.call('ZRANGE', P .. kind .. ':' .. tenant, 0, 0, 'WITHSCORES')
  if not first[1] or tonumber(first[2]) > server_ms() then
    relist_tenant(kind, tenant)
    return nil
  end
  local id, bytes = first[1], 0
  redis.call('ZREM', P .. kind .. ':' .. tenant, id)
  relist_tenant(kind, tenant)
  local job = read_job(id, 'state', unpack(KEPT_FIELDS))
  if not (job.state and TERMINAL[job.state]) then return 0 end
  if kind == 'texts' then
    if redis.call('EXISTS', P .. 'log:' .. id) == 1 then
      bytes = tonumber(job.held_log or '0')
      delete_text(id)
      release_text(job)
      redis.call('HSET', P .. 'job:' .. id, 'held_log', 0, 'text_until_ms', whole(server_ms()), 'text_why', 'memory')
    end
    after_text(id, tenant)
  else
    bytes = tonumber(job.held or '0')
    delete_record(id, job)
    release_record(job)
    write_tombstone(id, job, 0, 'memory')
  end
  redis.call('HINCRBY', P .. 'stat', 'store_grown', whole(0 - bytes))
  return bytes
end

-- Evicts the oldest texts, then the oldest records, for `bytes`; `of`: of this tenant alone. Returns the bytes
-- that went.
local function evict(bytes, most, of)
  local freed = 0
  for _, kind in ipairs({'texts', 'records'}) do
    while freed < bytes and most > 0 do
      local tenant = of or redis.call('ZRANGEBYSCORE', P .. kind, '-inf', whole(server_ms()), 'LIMIT', 0, 1)[1]
      local gone = tenant and evict_first(kind, tenant)
      if not gone and (of or not tenant) then break end  -- else that tenant's time was no longer true
      freed, most = freed + (gone or 0), most - 1
    end
  end
  return freed
end

-- Evicts what a refused or reserved submit of `bytes` needs. Returns whether anything went. Not while Redis may be
-- above maxmemory: after these writes it would let the script write more.
local function evict_for(tenant, bytes, why)
  local store = redis.call('HMGET', P .. 'stat', 'store_limit', 'store_used', 'store_grown')
  if tonumber(store[2] or '0') + tonumber(store[3] or '0') >= tonumber(store[1] or '0') then return false end
  return evict(ROOM * bytes, EVICTED_PER_SUBMIT, why == 'tenant_store' and tenant or nil) > 0
end

-- Those whose text or record has expired are listed no longer: a few, each time that one is added. Also of the
-- tenant whose first one is the oldest: else the names of tenants that send nothing more would stay.
local PRUNED = 3

local function prune_of(kind, name, tenant)
  local ids = redis.call('ZRANGE', P .. kind .. ':' .. tenant, 0, PRUNED - 1)
  local gone = 0
  for _, id in ipairs(ids) do
    if redis.call('EXISTS', P .. name .. id) == 1 then break end
    redis.call('ZREM', P .. kind .. ':' .. tenant, id)
    if kind == 'texts' then after_text(id, tenant) end
    gone = gone + 1
  end
  if gone > 0 or #ids == 0 then relist_tenant(kind, tenant) end
end

local function prune(tenant)
  for kind, name in pairs({texts = 'log:', records = 'job:'}) do
    prune_of(kind, name, tenant)
    local oldest = redis.call('ZRANGE', P .. kind, 0, 0)[1]
    if oldest and oldest ~= tenant then prune_of(kind, name, oldest) end
  end
end
