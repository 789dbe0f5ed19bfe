-- The fields of a queue entry: id of its job (nil: not a queue entry) and its number of choices,
-- which is how many places the job takes in a worker.
local function read_entry(fields)
  local id, choices
  for k = 1, #fields, 2 do
    if fields[k] == 'id' then id = fields[k + 1] end
    if fields[k] == 'c' then choices = tonumber(fields[k + 1]) end
  end
  return id, choices or 1
end
