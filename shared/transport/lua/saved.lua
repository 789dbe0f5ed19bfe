-- saved: jobs of rows whose results a batch of another partition has saved soon expire, as in batch_save.
-- ARGV: 3.. ids of jobs
-- Returns 1. Idempotent.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/parts.lua
--@include lib/retention.lua
--@include lib/saved.lua
for i = 3, #ARGV do keep_saved(ARGV[i]) end
return 1
