-- Dead letters: jobs that killed workers or engines, kept with their requests so that an operator can
-- inspect them and run them again. `dlq` lists them, the oldest first; `dead:<id>` has all of one.
-- Bounds: so many of them, so many bytes of requests in all, so long. The oldest are dropped first.
local DEAD_LETTERS_MAX, DEAD_LETTERS_MAX_BYTES, DEAD_LETTER_LIFE_MS = 1000, 67108864, 604800000
local REQUEUED_LIFE_MS = 86400000  -- how long a requeued one names its new job

local function drop_dead_letter(id, entry)
  redis.call('DEL', P .. 'dead:' .. id)
  redis.call('XDEL', P .. 'dlq', entry)
end

local function make_room(bytes)
  local kept_from = server_ms() - DEAD_LETTER_LIFE_MS  -- as the ids of entries have it
  local dead_letters, sum = redis.call('XRANGE', P .. 'dlq', '-', '+'), bytes
  local at = {}
  for k, dead_letter in ipairs(dead_letters) do
    local fields = {}
    for i = 1, #dead_letter[2], 2 do fields[dead_letter[2][i]] = dead_letter[2][i + 1] end
    at[k] = {id = fields.id, entry = dead_letter[1], bytes = tonumber(fields.bytes or '0')}
    sum = sum + at[k].bytes
  end
  for k, dead_letter in ipairs(at) do
    local is_old = tonumber(string.match(dead_letter.entry, '^%d+')) < kept_from
    if not is_old and #at - k + 1 < DEAD_LETTERS_MAX and sum <= DEAD_LETTERS_MAX_BYTES then return end
    drop_dead_letter(dead_letter.id, dead_letter.entry)
    sum = sum - dead_letter.bytes
  end
end

-- Before the latch, which frees the request.
local function write_dead_letter(id, reason, crashes)
  local job_key, dead_letter_key = P .. 'job:' .. id, P .. 'dead:' .. id
  local job = redis.call('HMGET', job_key, 'model', 'tenant', 'kind', 'n')
  local request = redis.call('GET', P .. 'req:' .. id) or ''
  local facts = redis.call('GET', P .. 'facts:' .. id) or ''
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
end

-- Deletes the dead letter; a later requeue gets the id of the job that took it.
local function take_dead_letter(id, new_id)
  local dead_letter_key = P .. 'dead:' .. id
  local dead_letter = redis.call('HMGET', dead_letter_key, 'entry', 'tenant')
  drop_dead_letter(id, dead_letter[1])
  redis.call('HSET', dead_letter_key, 'requeued_as', new_id, 'tenant', dead_letter[2])
  redis.call('PEXPIRE', dead_letter_key, REQUEUED_LIFE_MS)
end
