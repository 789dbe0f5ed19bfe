-- Hand a running job back to the queue with its log: the next recover of any worker takes it, ahead
-- of new work and without blame. XCLAIM comes first: it is allowed above maxmemory.
-- `consumer`: the pseudo consumer that gets the entry, by default RELEASED. `cause`: by default 'released'.
local function release(id, queue, entry, wid, consumer, cause)
  redis.call('XCLAIM', queue, GROUP, consumer or RELEASED, 0, entry, 'JUSTID')
  if redis.call('GET', P .. 'probe:' .. wid) == id then redis.call('DEL', P .. 'probe:' .. wid) end
  note_claim_end(id, redis.call('HGET', P .. 'job:' .. id, 'attempt'), cause or 'released')
  redis.call('HSET', P .. 'job:' .. id, 'state', 'queued', 'owner', '',
    'free_ms', whole(now_ms()))
  count_job(id, 'running', 'queued')
end
