-- The value of a queue entry's field; nil without it.
local function entry_field(fields, name)
  for k = 1, #fields, 2 do
    if fields[k] == name then return fields[k + 1] end
  end
end

-- The fields of a queue entry: id of its job (nil: not a queue entry) and its number of choices,
-- which is how many places the job takes in a worker.
local function read_entry(fields)
  return entry_field(fields, 'id'), tonumber(entry_field(fields, 'c') or '1')
end
