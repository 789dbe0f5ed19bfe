-- file_sweep: forgets files that have expired, and returns the names to remove from the disk.
-- ARGV: 3 most files and most names in one call, then names that have been removed
-- Returns names of blobs that nothing refers to. They are returned again until a caller passes them as
--   removed, which includes names that did not exist.
--@include lib/common.lua
--@include lib/held.lua
--@include lib/files.lua
for i = 4, #ARGV do redis.call('ZREM', P .. 'blobs_gone', ARGV[i]) end
local lost = false
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'files', '-inf', whole(server_ms()), 'LIMIT', 0,
    ARGV[3])) do
  lost = lost or redis.call('EXISTS', P .. 'file:' .. id) == 0
  drop_file(id)
end
if lost then  -- a hash expired before its sweep, and with it the bytes to subtract: count again
  for _, field in ipairs(redis.call('HKEYS', P .. 'files_bytes')) do
    local mine = P .. 'files:' .. (string.match(field, '^of:(.*)$') or '')
    for _, id in ipairs(redis.call('ZRANGE', mine, 0, -1)) do
      if redis.call('EXISTS', P .. 'file:' .. id) == 0 then redis.call('ZREM', mine, id) end
    end
  end
  redis.call('DEL', P .. 'files_bytes')
  for _, id in ipairs(redis.call('ZRANGE', P .. 'files', 0, -1)) do
    local file = redis.call('HMGET', P .. 'file:' .. id, 'tenant', 'bytes', 'expires_ms')
    if file[1] then
      count_bytes(file[1], file[2])
      keep_file(id, file[1], tonumber(file[3]))
    end
  end
end
return redis.call('ZRANGE', P .. 'blobs_gone', 0, tonumber(ARGV[3]) - 1)
