-- prefixes: notes which prefixes of prompts a worker's cache holds. Nothing but the place of jobs depends on it.
-- ARGV: 3 worker, 4 lease_ms, 5 '1': none but these are held any more, 6 digests that it holds now, 7 that it has
--   lost, of 8 bytes each, joined
-- Returns how many are noted; -1 without a lease.
--@include lib/common.lua
local DIGEST_BYTES = 8
local wid, key = ARGV[3], P .. 'prefixes:' .. ARGV[3]
if redis.call('EXISTS', P .. 'w:' .. wid) == 0 then return -1 end

local function each(joined, command)
  for at = 1, #joined, DIGEST_BYTES do
    redis.call(command, key, string.sub(joined, at, at + DIGEST_BYTES - 1))
  end
end

if ARGV[5] == '1' then redis.call('DEL', key) end
each(ARGV[7], 'SREM')
each(ARGV[6], 'SADD')
redis.call('PEXPIRE', key, ARGV[4])
return redis.call('SCARD', key)
