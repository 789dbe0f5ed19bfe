-- Needs lib/held.lua. Stored requests in parts (shared/transport/record_parts.py): `facts:<id>` is then an
-- index, whose first character is '#'. `part:<digest>` has the number of references to it, the time by
-- which its bytes count as expired, and its text; a group's text is the digests of its parts.
-- A part lives at least as long as every response that refers to it, and the parts of a group as long as
-- the group. A response that is forgotten takes its references back; one that expires leaves them, and
-- its parts expire too unless others need them.
local COUNT_DIGITS, TIME_DIGITS, DIGEST_CHARS = 10, 15, 20
local TEXT_AT = COUNT_DIGITS + TIME_DIGITS
local PART_BYTES = 150   -- of a part besides its value
local PART_SPARE = 1 / 8 -- of a life, so that few turns renew all parts of their conversation

-- Returns nil for a job without a stored request, and for a request in one piece.
local function index_of(id)
  local facts = P .. 'facts:' .. id
  return redis.call('GETRANGE', facts, 0, 0) == '#' and redis.call('GET', facts) or nil
end

local function group_members(text)
  local digests = {}
  for at = 1, #text, DIGEST_CHARS do digests[#digests + 1] = string.sub(text, at, at + DIGEST_CHARS - 1) end
  return digests
end

local function text_of_part(digest)
  return redis.call('GETRANGE', P .. 'part:' .. digest, TEXT_AT, -1)
end

-- Yields the digest of each part and group in an index, and whether it is a group.
local function references(index)
  local next_one = string.gmatch(index, '\n([=-])([^\n]+)')
  return function()
    local mark, digest = next_one()
    return digest, mark == '='
  end
end

local function all_exist(digests)
  local keys = {}
  for k, digest in ipairs(digests) do keys[k] = P .. 'part:' .. digest end
  return redis.call('EXISTS', unpack(keys)) == #keys
end

-- What is written of the parts of one request: `life_ms` of those that have less than `least_ms`, and
-- bytes of new ones (`added`) and of others by the time by which they count as expired (`counted`).
local function part_changes(needed_ms)
  local life_ms = needed_ms * (1 + PART_SPARE)
  return {least_ms = needed_ms, life_ms = life_ms, gone_ms = keep_held('', 0, life_ms), added = 0, counted = {}}
end

-- The bytes of a part and the time by which they count as expired.
local function counted_of(key)
  local gone_ms = redis.call('GETRANGE', key, COUNT_DIGITS, TEXT_AT - 1)
  return PART_BYTES + redis.call('STRLEN', key), whole(tonumber(gone_ms))
end

local function note_counted(changes, bytes, gone_ms)
  changes.counted[gone_ms] = (changes.counted[gone_ms] or 0) + bytes
end

-- Returns false if the part, or one of the group, is missing.
local function keep_part(changes, digest, is_group, least_ms)
  local key = P .. 'part:' .. digest
  local left_ms = redis.call('PTTL', key)
  if left_ms == -2 then return false end
  local digests = is_group and group_members(text_of_part(digest)) or {}
  if left_ms >= least_ms then return #digests == 0 or all_exist(digests) end
  for _, member in ipairs(digests) do
    if not keep_part(changes, member, false, changes.life_ms) then return false end
  end
  redis.call('PEXPIRE', key, whole(changes.life_ms))
  note_counted(changes, counted_of(key))
  redis.call('SETRANGE', key, COUNT_DIGITS, string.format('%015.0f', changes.gone_ms))
  return true
end

-- Counts a reference. Writes the part where it is missing; `texts`: of all parts, by 'part:<digest>'.
local function refer_to_part(changes, digest, is_group, least_ms, texts)
  local key = P .. 'part:' .. digest
  local is_kept = keep_part(changes, digest, is_group, least_ms)
  local count = tonumber(redis.call('GETRANGE', key, 0, COUNT_DIGITS - 1)) or 0  -- a group may lack a part
  if is_kept then
    redis.call('SETRANGE', key, 0, string.format('%010.0f', count + 1))
    return
  end
  local text = texts['part:' .. digest]
  for _, member in ipairs(is_group and group_members(text) or {}) do
    refer_to_part(changes, member, false, changes.life_ms, texts)
  end
  changes.added = changes.added + PART_BYTES + TEXT_AT + #text
  local header = string.format('%010.0f%015.0f', count + 1, changes.gone_ms)
  redis.call('SET', key, header .. text, 'PX', whole(changes.life_ms))
end

local function release_part(changes, digest, is_group)
  local key = P .. 'part:' .. digest
  local count = redis.call('GETRANGE', key, 0, COUNT_DIGITS - 1)
  if count == '' then return end
  if tonumber(count) > 1 then
    redis.call('SETRANGE', key, 0, string.format('%010.0f', tonumber(count) - 1))
    return
  end
  local digests = is_group and group_members(text_of_part(digest)) or {}
  note_counted(changes, counted_of(key))
  redis.call('DEL', key)
  for _, member in ipairs(digests) do release_part(changes, member, false) end
end

-- Reads only: the bytes that refer_to_parts would add.
local function new_part_bytes(index, texts)
  local sum = 0
  local function add(digest)
    if redis.call('EXISTS', P .. 'part:' .. digest) == 1 then return false end
    sum = sum + PART_BYTES + TEXT_AT + #texts['part:' .. digest]
    return true
  end
  for digest, is_group in references(index) do
    if add(digest) and is_group then
      for _, member in ipairs(group_members(texts['part:' .. digest])) do add(member) end
    end
  end
  return sum
end

local function hold_kept(tenant, changes)
  for gone_ms, bytes in pairs(changes.counted) do keep_held_for(tenant, bytes, gone_ms, changes.life_ms) end
end

local function refer_to_parts(tenant, index, needed_ms, texts)
  local changes = part_changes(needed_ms)
  for digest, is_group in references(index) do
    refer_to_part(changes, digest, is_group, needed_ms, texts)
  end
  hold_kept(tenant, changes)
  hold(tenant, changes.added, changes.life_ms)
  keep_held(tenant, changes.added, changes.life_ms)
end

local function keep_parts(tenant, index, needed_ms)
  local changes = part_changes(needed_ms)
  for digest, is_group in references(index) do keep_part(changes, digest, is_group, needed_ms) end
  hold_kept(tenant, changes)
end

local function release_parts(tenant, index)
  local changes = {counted = {}}
  for digest, is_group in references(index) do release_part(changes, digest, is_group) end
  for gone_ms, bytes in pairs(changes.counted) do release_held(tenant, bytes, gone_ms) end
end

-- A job's stored request in one piece: '' without one, nil if a part of it is missing.
local function stored_request(id)
  local facts = redis.call('GET', P .. 'facts:' .. id) or ''
  if string.sub(facts, 1, 1) ~= '#' then return facts end
  local pieces, is_whole = {}, true
  local function add(digest)
    local text = text_of_part(digest)
    is_whole = is_whole and text ~= ''
    pieces[#pieces + 1] = text
  end
  for mark, rest in string.gmatch(facts, '\n([=%- ])([^\n]*)') do
    if mark == ' ' then
      pieces[#pieces + 1] = rest
    elseif mark == '-' then
      add(rest)
    else
      local group = text_of_part(rest)
      is_whole = is_whole and group ~= ''
      for _, digest in ipairs(group_members(group)) do add(digest) end
    end
  end
  return is_whole and table.concat(pieces, '\n') or nil
end
