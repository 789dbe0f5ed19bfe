-- The accounts of tenants, of the whole deployment. `cpu`: tenant -> microseconds of processors; `refused`:
-- tenant -> requests that were refused. Totals since the last one of them was written to for a month.
local ACCOUNT_LIFE_MS = 30 * 86400000
local MAX_ACCOUNTS = 10000       -- then all restart at 0, as a counter may

local function add_to_account(name, tenant, amount)
  if tonumber(amount) <= 0 then return end
  local key = P .. name
  if redis.call('HINCRBY', key, tenant, amount) == tonumber(amount) and redis.call('HLEN', key) > MAX_ACCOUNTS then
    redis.call('DEL', key)
    redis.call('HSET', key, tenant, amount)
  end
  expire_at_least(key, ACCOUNT_LIFE_MS)
end

-- Reads `count` triples of the arguments from `from` on: tenant, microseconds, refused requests. Returns
-- the index after them.
local function charge_accounts(from, count)
  local past = from + 3 * count
  for i = from, past - 1, 3 do
    add_to_account('cpu', ARGV[i], ARGV[i + 1])
    add_to_account('refused', ARGV[i], ARGV[i + 2])
  end
  return past
end
