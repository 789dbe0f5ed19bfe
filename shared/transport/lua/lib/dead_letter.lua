-- Dead letters: jobs that killed workers or engines, kept with their requests so that an operator can
-- inspect them and run them again. `dlq` lists them, the oldest first; `dead:<id>` has all of one.
-- Bounds: so many letters, so many bytes of requests in all, so long. The oldest are dropped first.
local LETTERS_MAX, LETTERS_MAX_BYTES, LETTER_LIFE_MS = 1000, 67108864, 604800000
local REQUEUED_LIFE_MS = 86400000  -- how long a letter that was taken says by which job

local function drop_letter(id, entry)
  redis.call('DEL', P .. 'dead:' .. id)
  redis.call('XDEL', P .. 'dlq', entry)
end

local function make_room(bytes)
  local kept_from = server_ms() - LETTER_LIFE_MS  -- as the ids of entries have it
  local letters, sum = redis.call('XRANGE', P .. 'dlq', '-', '+'), bytes
  local at = {}
  for k, letter in ipairs(letters) do
    local fields = {}
    for i = 1, #letter[2], 2 do fields[letter[2][i]] = letter[2][i + 1] end
    at[k] = {id = fields.id, entry = letter[1], bytes = tonumber(fields.bytes or '0')}
    sum = sum + at[k].bytes
  end
  for k, letter in ipairs(at) do
    local is_old = tonumber(string.match(letter.entry, '^%d+')) < kept_from
    if not is_old and #at - k + 1 < LETTERS_MAX and sum <= LETTERS_MAX_BYTES then return end
    drop_letter(letter.id, letter.entry)
    sum = sum - letter.bytes
  end
end

-- Before the latch, which frees the request.
local function write_letter(id, reason, crashes)
  local job_key, letter_key = P .. 'job:' .. id, P .. 'dead:' .. id
  local job = redis.call('HMGET', job_key, 'model', 'tenant', 'kind', 'n')
  local request = redis.call('GET', P .. 'req:' .. id) or ''
  local facts = redis.call('GET', P .. 'facts:' .. id) or ''
  local bytes = #request + #facts
  if bytes > LETTERS_MAX_BYTES then request, facts, bytes = '', '', 0 end
  make_room(bytes)
  local entry = redis.call('XADD', P .. 'dlq', '*', 'id', id, 'reason', reason, 'crashes', crashes,
    'n', job[4] or '0', 'bytes', bytes)
  redis.call('PEXPIRE', P .. 'dlq', LETTER_LIFE_MS)
  redis.call('HSET', letter_key, 'entry', entry, 'reason', reason, 'crashes', crashes,
    'n', job[4] or '0', 'model', job[1] or '', 'tenant', job[2] or '', 'kind', job[3] or '',
    'died_ms', whole(now_ms()), 'request', request, 'facts', facts)
  redis.call('PEXPIRE', letter_key, LETTER_LIFE_MS)
end

-- Drops the letter; a later requeue gets the id of the job that took it.
local function take_letter(id, new_id)
  local letter_key = P .. 'dead:' .. id
  local letter = redis.call('HMGET', letter_key, 'entry', 'tenant')
  drop_letter(id, letter[1])
  redis.call('HSET', letter_key, 'requeued_as', new_id, 'tenant', letter[2])
  redis.call('PEXPIRE', letter_key, REQUEUED_LIFE_MS)
end
