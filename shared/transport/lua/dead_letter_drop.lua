-- dead_letter_drop: delete a dead letter.
-- ARGV: 3 id of the job
-- Returns 1, or 0 if it does not exist (any more). Idempotent.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/dead_letter.lua
local entry = redis.call('HGET', P .. 'dead:' .. ARGV[3], 'entry')
if not entry then return 0 end
drop_dead_letter(ARGV[3], entry)
return 1
