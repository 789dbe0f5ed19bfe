-- Needs lib/held.lua. The index of files whose bytes lie on a disk that the frontends share. A file that goes leaves the
-- names of its parts in `blobs_gone` until a frontend has removed them from that disk.
local FILE_LEFTOVER_MS = 604800000   -- how long the keys outlive a file, so that a sweep finds it

local FILE_BYTES = 800   -- of a record in Redis, besides its name and its list of parts

local function count_bytes(tenant, step)
  redis.call('HINCRBY', P .. 'files_bytes', 'total', step)
  if redis.call('HINCRBY', P .. 'files_bytes', 'of:' .. tenant, step) <= 0 then
    redis.call('HDEL', P .. 'files_bytes', 'of:' .. tenant)
  end
end

-- Until when a file is kept; never sooner than before.
local function keep_file(id, tenant, expires_ms)
  local key, life_ms = P .. 'file:' .. id, expires_ms - server_ms() + FILE_LEFTOVER_MS
  local until_ms = math.max(expires_ms, tonumber(redis.call('HGET', key, 'expires_ms') or '0'))
  redis.call('HSET', key, 'expires_ms', whole(until_ms))
  redis.call('ZADD', P .. 'files', whole(until_ms), id)
  for _, name in ipairs({'file:' .. id, 'files', 'files:' .. tenant, 'files_bytes'}) do
    expire_at_least(P .. name, life_ms)
  end
  local held = redis.call('HMGET', key, 'held', 'kept_until_ms')
  local gone_ms = held[1] and keep_held_for(tenant, tonumber(held[1]), held[2] or nil, until_ms - server_ms() + FILE_LEFTOVER_MS)
  if gone_ms then redis.call('HSET', key, 'kept_until_ms', gone_ms) end
end

local function file_bytes(name, parts) return FILE_BYTES + #name + #parts end

-- `file` has tenant, purpose, name, bytes, parts (JSON) and life_ms. The caller has checked that the id
-- is free.
local function put_file(id, file)
  local now = server_ms()
  redis.call('HSET', P .. 'file:' .. id, 'v', SCHEMA_VERSION, 'tenant', file.tenant,
    'purpose', file.purpose, 'name', file.name, 'bytes', file.bytes, 'parts', file.parts,
    'created_ms', whole(now), 'uses', 0)
  redis.call('ZADD', P .. 'files:' .. file.tenant, whole(now), id)
  count_bytes(file.tenant, file.bytes)
  local bytes, life_ms = file_bytes(file.name, file.parts), tonumber(file.life_ms)
  hold(file.tenant, bytes, life_ms)
  redis.call('HSET', P .. 'file:' .. id, 'held', bytes,
    'kept_until_ms', keep_held(file.tenant, bytes, life_ms + FILE_LEFTOVER_MS))
  keep_file(id, file.tenant, now + life_ms)
end

local function forget_blobs(names)
  for _, name in ipairs(names) do redis.call('ZADD', P .. 'blobs_gone', whole(server_ms()), name) end
  if #names > 0 then redis.call('PEXPIRE', P .. 'blobs_gone', FILE_LEFTOVER_MS) end
end

-- The parts are a JSON list of [name, bytes, digest]; names have no quotation mark.
local function names_of(parts)
  local names = {}
  for name in string.gmatch(parts or '', '%[%s*"([^"]+)"') do names[#names + 1] = name end
  return names
end

local function drop_file(id)
  local key = P .. 'file:' .. id
  local file = redis.call('HMGET', key, 'tenant', 'bytes', 'parts', 'held', 'kept_until_ms')
  redis.call('ZREM', P .. 'files', id)
  redis.call('DEL', key)
  if not file[1] then return end
  redis.call('ZREM', P .. 'files:' .. file[1], id)
  count_bytes(file[1], whole(0 - tonumber(file[2])))
  if file[4] then release_held(file[1], tonumber(file[4]), file[5]) end
  forget_blobs(names_of(file[3]))
end
