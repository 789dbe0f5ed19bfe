-- Needs lib/held.lua and lib/parts.lua. Dead letters: jobs that killed workers or engines, kept with their requests so that an operator can
-- inspect them and run them again. `dlq` lists them, the oldest first; `dead:<id>` has all of one.
-- Bounds: number, bytes of requests in all, lifetime. The oldest are dropped first.
local DEAD_LETTERS_MAX, DEAD_LETTERS_MAX_BYTES, DEAD_LETTER_LIFE_MS = 1000, 67108864, 604800000
local DEAD_LETTER_BYTES = 1000   -- of one, besides its request
local REQUEUED_LIFE_MS = 86400000  -- how long a requeued one names its new job

local function drop_dead_letter(id, entry)
  local held = redis.call('HMGET', P .. 'dead:' .. id, 'tenant', 'held', 'kept_until_ms')
  redis.call('DEL', P .. 'dead:' .. id)
  if held[2] then release_held(held[1], tonumber(held[2]), held[3]) end
  redis.call('XDEL', P .. 'dlq', entry)
end

-- The oldest go first; where that is for bytes, those of the tenant that has the most of them.
local function make_room(bytes)
  local kept_from = server_ms() - DEAD_LETTER_LIFE_MS  -- as the ids of entries have it
  local kept, sum = {}, bytes
  for _, entry in ipairs(redis.call('XRANGE', P .. 'dlq', '-', '+')) do
    local fields = {}
    for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
    if tonumber(string.match(entry[1], '^%d+')) < kept_from then
      drop_dead_letter(fields.id, entry[1])
    else
      kept[#kept + 1] = {id = fields.id, entry = entry[1], bytes = tonumber(fields.bytes or '0')}
      sum = sum + kept[#kept].bytes
    end
  end
  while #kept >= DEAD_LETTERS_MAX do
    sum = sum - kept[1].bytes
    drop_dead_letter(kept[1].id, kept[1].entry)
    table.remove(kept, 1)
  end
  if sum <= DEAD_LETTERS_MAX_BYTES then return end
  local by_tenant = {}
  for _, dead_letter in ipairs(kept) do
    dead_letter.tenant = redis.call('HGET', P .. 'dead:' .. dead_letter.id, 'tenant') or ''
    by_tenant[dead_letter.tenant] = (by_tenant[dead_letter.tenant] or 0) + dead_letter.bytes
  end
  while sum > DEAD_LETTERS_MAX_BYTES do
    local most, at = nil, nil
    for tenant, held in pairs(by_tenant) do
      if not most or held > by_tenant[most] then most = tenant end
    end
    for k, dead_letter in ipairs(kept) do
      if dead_letter.tenant == most then at = k break end
    end
    if not at then return end
    local dead_letter = table.remove(kept, at)
    drop_dead_letter(dead_letter.id, dead_letter.entry)
    sum, by_tenant[most] = sum - dead_letter.bytes, by_tenant[most] - dead_letter.bytes
  end
end

-- Before the latch, which frees the request.
local function write_dead_letter(id, reason, crashes)
  local job_key, dead_letter_key = P .. 'job:' .. id, P .. 'dead:' .. id
  local job = redis.call('HMGET', job_key, 'model', 'tenant', 'kind', 'n')
  local request = redis.call('GET', P .. 'req:' .. id) or ''
  local facts = stored_request(id) or ''
  local bytes = #request + #facts
  if bytes > DEAD_LETTERS_MAX_BYTES then request, facts, bytes = '', '', 0 end
  make_room(bytes)
  local entry = redis.call('XADD', P .. 'dlq', '*', 'id', id, 'reason', reason, 'crashes', crashes,
    'n', job[4] or '0', 'bytes', bytes)
  redis.call('PEXPIRE', P .. 'dlq', DEAD_LETTER_LIFE_MS)
  redis.call('HSET', dead_letter_key, 'entry', entry, 'reason', reason, 'crashes', crashes,
    'n', job[4] or '0', 'model', job[1] or '', 'tenant', job[2] or '', 'kind', job[3] or '',
    'died_ms', whole(now_ms()), 'request', request, 'facts', facts)
  redis.call('PEXPIRE', dead_letter_key, DEAD_LETTER_LIFE_MS)
  local tenant, held = job[2] or '', DEAD_LETTER_BYTES + bytes
  hold(tenant, held, DEAD_LETTER_LIFE_MS)
  redis.call('HSET', dead_letter_key, 'held', held, 'kept_until_ms', keep_held(tenant, held, DEAD_LETTER_LIFE_MS))
end

-- Deletes the dead letter; a later requeue gets the id of the job that took it.
local function take_dead_letter(id, new_id)
  local dead_letter_key = P .. 'dead:' .. id
  local dead_letter = redis.call('HMGET', dead_letter_key, 'entry', 'tenant')
  drop_dead_letter(id, dead_letter[1])
  redis.call('HSET', dead_letter_key, 'requeued_as', new_id, 'tenant', dead_letter[2])
  redis.call('PEXPIRE', dead_letter_key, REQUEUED_LIFE_MS)
end
