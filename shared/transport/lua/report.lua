-- report: stores a process's report, and lists the process while its reports continue.
-- ARGV: 3 'frontend' or 'loading' (a worker that cannot serve yet), 4 its id, 5 ms for which it is valid,
--   6 number of accounts, then as many triples (lib/accounts.lua), number of counts, then their names and
--   amounts, number of figures, then their names and values (lib/history.lua), then names and values
-- Returns 1. PEXPIRE is first, as in heartbeat.lua: the report of a process that is listed is not refused
-- above maxmemory.
--@include lib/common.lua
--@include lib/accounts.lua
--@include lib/history.lua
local kind, id, life_ms = ARGV[3], ARGV[4], tonumber(ARGV[5])
local key, index, now = P .. kind .. ':' .. id, P .. kind .. 's', server_ms()
redis.call('PEXPIRE', key, life_ms)
-- Notes as many pairs as ARGV[at] holds. Returns the index after them.
local function note_all(at, note)
  local past = at + 1 + 2 * tonumber(ARGV[at])
  for i = at + 1, past - 1, 2 do note(ARGV[i], ARGV[i + 1]) end
  return past
end

local figures = note_all(charge_accounts(7, tonumber(ARGV[6])), note_count)
local stats = note_all(figures, note_most)
redis.call('HSET', key, 'report_ms', whole(now), unpack(ARGV, stats))
redis.call('PEXPIRE', key, life_ms)
redis.call('ZADD', index, whole(now), id)
redis.call('ZREMRANGEBYSCORE', index, '-inf', whole(now - life_ms))
redis.call('PEXPIRE', index, life_ms)
return 1
