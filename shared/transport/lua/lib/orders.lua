-- What an operator has ordered. `order:<worker>`: 'drain', 'exit' or 'serve'; the worker reads it with its
-- next heartbeat and remembers it. `paused`: model -> '<ms>|<who>', a queue that no worker takes from.
local ORDER_MS = 86400000
local PAUSED_MS = 604800000  -- each reap renews it
local MAX_PAUSED = 1000

local function order_of(wid)
  return redis.call('GET', P .. 'order:' .. wid) or ''
end

-- Any other word, also a newer release's, is an order to take nothing.
local function takes_nothing(order) return order ~= '' and order ~= 'serve' end

-- The `queues` that this worker may take jobs from now, and whether others were left out. A worker
-- that has not read its order yet takes nothing either.
local function open_queues(wid, queues)
  if takes_nothing(order_of(wid)) then return {}, true end
  if redis.call('EXISTS', P .. 'paused') == 0 then return queues, false end
  local open = {}
  for _, queue in ipairs(queues) do
    local model = string.match(string.sub(queue, #P + 1), '^q:(.*):%d$')
    if redis.call('HEXISTS', P .. 'paused', model) == 0 then open[#open + 1] = queue end
  end
  return open, #open < #queues
end
