-- record: reads a job's stored request.
-- ARGV: 3 id
-- Returns it in one piece; '' without one; nil if a part of it is missing. Idempotent; reads only.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/parts.lua
return stored_request(ARGV[3])
