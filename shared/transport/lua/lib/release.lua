-- Hand a running job back to the queue with its log: the next recover of any worker takes it, ahead
-- of new work and without blame. XCLAIM comes first: it is allowed above maxmemory.
local function release(id, job, wid)
  redis.call('XCLAIM', job.queue, GROUP, RELEASED, 0, job.entry, 'JUSTID')
  if redis.call('GET', P .. 'probe:' .. wid) == id then redis.call('DEL', P .. 'probe:' .. wid) end
  redis.call('HSET', P .. 'job:' .. id, 'state', 'queued', 'owner', '')
  count_job(job.tenant, job.prompt_tokens, 'queued', 1)
  count_job(job.tenant, job.prompt_tokens, 'running', -1)
end
