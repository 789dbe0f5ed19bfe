-- order: orders a worker to drain, to drain and exit, or to serve again.
-- ARGV: 3 worker, 4 'drain', 'exit' or 'serve'
-- Returns 'OK', 'GONE' (no such worker lives) or 'OLD' (its release does not read orders: nothing is
-- written). From this step on the worker takes no job (lib/orders.lua), whenever it reads the order.
--@include lib/common.lua
--@include lib/orders.lua
local wid, order = ARGV[3], ARGV[4]
local lease = P .. 'w:' .. wid
if redis.call('EXISTS', lease) == 0 then return 'GONE' end
if redis.call('HEXISTS', lease, 'order') == 0 then return 'OLD' end
redis.call('DEL', P .. 'order:' .. wid)  -- never refused above maxmemory, and the rest may then be written
redis.call('SET', P .. 'order:' .. wid, order, 'PX', ORDER_MS)
redis.call('HSET', lease, 'order', order)
-- Its next heartbeat reports whether it drains for another reason.
if takes_nothing(order) then redis.call('HSET', lease, 'draining', 1) end
return 'OK'
