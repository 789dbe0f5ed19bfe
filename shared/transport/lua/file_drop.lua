-- file_drop: forget one's own file; its bytes go with the next sweep.
-- ARGV: 3 id, 4 tenant
-- Returns {'OK'}, {'GONE'}, or {'USED'}: a batch that has not ended reads it.
-- Idempotent: a repeat answers GONE.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/files.lua
local file = redis.call('HMGET', P .. 'file:' .. ARGV[3], 'tenant', 'uses')
if file[1] ~= ARGV[4] then return {'GONE'} end
if tonumber(file[2]) > 0 then return {'USED'} end
drop_file(ARGV[3])
return {'OK'}
