-- confirm: notes the durability that the acceptance of a job or a batch waits for. It is the write that a
-- following WAITAOF or WAIT on the same connection covers, together with all writes before it.
-- ARGV: 3 'job' or 'batch', 4 id, 5 durability
-- Returns 1, or 0 for an unknown id. Idempotent.
--@include lib/common.lua
local key = P .. ARGV[3] .. ':' .. ARGV[4]
if redis.call('EXISTS', key) == 0 then return 0 end
redis.call('HSET', key, 'durability', ARGV[5])
return 1
