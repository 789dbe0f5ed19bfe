-- The newest entry of a queue that was delivered to anybody; '0-0' when none was.
local function last_delivered(queue)
  local groups = redis.pcall('XINFO', 'GROUPS', queue)
  if groups.err then return '0-0' end
  for _, group in ipairs(groups) do
    local name, last
    for k = 1, #group, 2 do
      if group[k] == 'name' then name = group[k + 1] end
      if group[k] == 'last-delivered-id' then last = group[k + 1] end
    end
    if name == GROUP then return last end
  end
  return '0-0'
end

local function is_after(entry, other)
  local ms, seq = string.match(entry, '^(%d+)-(%d+)$')
  local other_ms, other_seq = string.match(other, '^(%d+)-(%d+)$')
  if ms ~= other_ms then return tonumber(ms) > tonumber(other_ms) end
  return tonumber(seq) > tonumber(other_seq)
end
