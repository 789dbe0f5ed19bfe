"""Which waiting jobs go to which worker by the prefixes that their caches hold."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import Job
from shared.prefixes import DIGEST_BYTES, PREFIX_STEP, digests_of_prompt
from shared.transport.connect import RedisTransport
from shared.transport.ports.queue import Delivery, WorkerReport
from tests.support.jobs import MODEL, Stream, make_job
from tests.support.polling import until
from tests.support.transport_steps import FINISHED, LEASE_MS, Steps, other_process

FAR_MS = 600_000  # no test takes so long
TENANT = make_job().tenant
SHORT_MS = 200
LONG, OTHER = (range(first, first + 4 * PREFIX_STEP) for first in (0, 10_000))


async def workers_of(
    transport: RedisTransport, count: int, *, defer_ms: int = 0, affinity_ms: int = FAR_MS
) -> list[Steps]:
    """Workers w0, w1, ... that have asked for work and found none, each a process of its own."""
    found = []
    for at in range(count):
        steps = other_process(
            transport, defer_ms=defer_ms, asking_ms=FAR_MS, affinity_ms=affinity_ms
        )
        await steps.worker(f"w{at}")
        assert await steps.pull(f"w{at}") == []
        found.append(steps)
    return found


async def holds(steps: Steps, worker_id: str, prompt: range, num_steps: int = 4) -> None:
    """The worker's cache holds the first `num_steps` steps of the prompt, and nothing else."""
    joined = digests_of_prompt(TENANT, prompt)
    held = [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]
    noted = await steps.queue.note_prefixes(
        worker_id, LEASE_MS, held[:num_steps], (), is_first=True
    )
    assert noted == num_steps


async def left_and_ahead(workers: list[Steps]) -> tuple[Job, Job]:
    """Submits a job whose prefix the second worker holds, and one after it that any may take."""
    await holds(workers[1], "w1", LONG)
    return await workers[0].submit(prompt=LONG), await workers[0].submit()


async def ids_pulled(steps: Steps, worker_id: str, count: int = 8) -> list[str]:
    return [delivery.job.job_id for delivery in await steps.pull(worker_id, count)]


async def end(steps: Steps, worker_id: str, delivery: Delivery) -> None:
    await steps.say(worker_id, Stream(delivery), [5], "a", end=FINISHED)


@pytest.mark.promise(
    "Access: a waiting job goes first to the worker whose prefix cache holds the longest part of "
    "its prompt, and to any other 40 ms after its submit"
)
async def test_a_job_goes_to_the_worker_that_holds_most_of_its_prefix(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 3)
    await holds(workers[1], "w1", LONG, 2)
    await holds(workers[2], "w2", LONG, 3)
    job = await workers[0].submit(prompt=LONG)
    assert await ids_pulled(workers[0], "w0") == []
    assert await ids_pulled(workers[1], "w1") == []
    assert await ids_pulled(workers[2], "w2") == [job.job_id]
    assert (await workers[0].record(job.job_id)).placed == "prefix"


async def test_a_job_whose_prefix_nobody_holds_goes_to_any_worker(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 2)
    await holds(workers[1], "w1", LONG)
    jobs = [await workers[0].submit(prompt=prompt) for prompt in (OTHER, range(3))]
    assert await ids_pulled(workers[0], "w0") == [job.job_id for job in jobs]
    assert (await workers[0].record(jobs[0].job_id)).placed == "any"


async def test_another_tenants_prefix_counts_not(transport: RedisTransport) -> None:
    workers = await workers_of(transport, 2)
    await holds(workers[1], "w1", LONG)
    job = await workers[0].submit(prompt=LONG, tenant="another")
    assert await ids_pulled(workers[0], "w0") == [job.job_id]


async def test_a_longer_prefix_with_a_hole_counts_as_far_as_the_hole(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 2)
    await holds(workers[0], "w0", LONG, 1)
    await holds(workers[1], "w1", LONG, 4)
    first = digests_of_prompt(TENANT, LONG)[:DIGEST_BYTES]
    await workers[1].queue.note_prefixes("w1", LEASE_MS, (), [first], is_first=False)
    job = await workers[0].submit(prompt=LONG)
    assert await ids_pulled(workers[0], "w0") == [job.job_id]


async def test_jobs_behind_one_that_is_left_to_another_are_taken_ahead_and_once(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 2)
    await holds(workers[1], "w1", LONG)
    left = await workers[0].submit(prompt=LONG)
    behind = [await workers[0].submit() for _ in range(3)]
    assert await ids_pulled(workers[0], "w0") == [job.job_id for job in behind]
    assert await ids_pulled(workers[1], "w1") == [left.job_id]
    later = await workers[0].submit()
    assert await ids_pulled(workers[1], "w1") == [later.job_id]
    assert await ids_pulled(workers[0], "w0") == []
    await workers[0].assert_counters_true()


async def test_an_entry_taken_ahead_is_left_alone_by_workers_that_know_no_prefixes(
    transport: RedisTransport,
) -> None:
    """A worker of an older release, or one with the setting at 0."""
    workers = await workers_of(transport, 2)
    old = other_process(transport, defer_ms=0, asking_ms=FAR_MS, affinity_ms=0)
    await old.worker("old")
    left, ahead = await left_and_ahead(workers)
    (delivery,) = await workers[0].pull("w0")
    assert delivery.job.job_id == ahead.job_id
    assert await ids_pulled(old, "old") == [left.job_id]
    assert await ids_pulled(old, "old") == []
    assert await workers[0].queue.reconcile("w0", frozenset({ahead.job_id})) == []
    await end(workers[0], "w0", delivery)
    assert (await workers[0].record(ahead.job_id)).attempt == 1


async def test_a_job_taken_ahead_is_recovered_once_when_its_worker_dies(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 3)
    left, ahead = await left_and_ahead(workers)
    assert await ids_pulled(workers[0], "w0") == [ahead.job_id]
    await workers[0].die("w0")
    assert await ids_pulled(workers[2], "w2") == []
    recovered = await workers[2].queue.recover("w2", 8)
    assert [(one.job.job_id, one.attempt) for one in recovered] == [(ahead.job_id, 2)]
    assert await ids_pulled(workers[1], "w1") == [left.job_id]
    assert await ids_pulled(workers[2], "w2") == []


async def test_a_job_taken_ahead_and_in_a_crash_is_left_to_recover(
    transport: RedisTransport,
) -> None:
    """Recover alone decides beside what a suspect may run."""
    workers = await workers_of(transport, 2)
    old = other_process(transport, defer_ms=0, asking_ms=FAR_MS, affinity_ms=0)
    await old.worker("old")
    left, ahead = await left_and_ahead(workers)
    assert await ids_pulled(workers[0], "w0") == [ahead.job_id]
    await workers[0].queue.crashed("w0", [(ahead.job_id, 1)])
    assert await ids_pulled(old, "old") == [left.job_id]
    (recovered,) = await old.queue.recover("old", 8)
    assert (recovered.job.job_id, recovered.crashes) == (ahead.job_id, 1)


async def test_every_eighth_job_is_the_oldest_that_is_not_left_to_another(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 2)
    await holds(workers[1], "w1", LONG)
    await workers[0].submit(prompt=LONG, lane=7)
    oldest = await workers[0].submit(lane=7)
    for _ in range(8):
        await workers[0].submit()
    taken = [(await workers[0].pull("w0", 1))[0].job for _ in range(8)]
    assert [job.lane for job in taken] == [0] * 7 + [7]
    assert taken[-1].job_id == oldest.job_id


async def test_nothing_is_left_to_a_worker_that_cannot_take_it(transport: RedisTransport) -> None:
    workers = await workers_of(transport, 5)
    for at in range(1, 5):
        await holds(workers[at], f"w{at}", LONG)
    await workers[1].heartbeat("w1", draining=True)
    await workers[2].heartbeat("w2", stalled=True)
    await workers[3].die("w3")
    full = await workers[4].submit(prompt=LONG)
    assert await ids_pulled(workers[4], "w4", 1) == [full.job_id]
    job = await workers[0].submit(prompt=LONG)
    assert await ids_pulled(workers[0], "w0") == [job.job_id]


async def test_a_worker_gets_no_more_than_a_bounded_part_for_its_prefixes(
    transport: RedisTransport,
) -> None:
    """Of 16 jobs that all share what one of four workers holds: a quarter more than an even part,
    and one."""
    workers = await workers_of(transport, 4, defer_ms=FAR_MS)
    await holds(workers[3], "w3", LONG)
    for _ in range(16):
        await workers[0].submit(prompt=LONG)
    taken = [len(await workers[at].pull(f"w{at}", 100)) for at in (0, 1, 2, 3)]
    assert taken == [4, 4, 2, 6]


async def test_a_job_is_taken_by_any_worker_when_the_holder_does_not_come(
    transport: RedisTransport,
) -> None:
    """It has asked, lives, and stands still from then on; the other one's wait ends by itself."""
    workers = await workers_of(transport, 2, affinity_ms=SHORT_MS)
    await holds(workers[1], "w1", LONG)
    job = await workers[0].submit(prompt=LONG)
    (delivery,) = await workers[0].queue.pull("w0", 8, LEASE_MS)
    assert delivery.job.job_id == job.job_id
    assert not delivery.is_by_prefix


async def test_a_job_that_its_holder_has_not_taken_goes_to_any_worker_beyond_its_portion(
    transport: RedisTransport,
) -> None:
    """Else it would wait a second time, for the worker that holds fewer jobs."""
    workers = await workers_of(transport, 2, defer_ms=FAR_MS, affinity_ms=SHORT_MS)
    await holds(workers[1], "w1", LONG)
    await workers[0].submit()
    assert len(await workers[0].pull("w0")) == 1
    job = await workers[0].submit(prompt=LONG)
    (delivery,) = await workers[0].queue.pull("w0", 8, LEASE_MS)
    assert delivery.job.job_id == job.job_id
    assert (await workers[0].record(job.job_id)).placed == "late"


async def test_a_job_with_a_prefix_that_nobody_holds_stays_within_the_portions(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 2, defer_ms=FAR_MS, affinity_ms=SHORT_MS)
    await workers[0].submit()
    assert len(await workers[0].pull("w0")) == 1
    job = await workers[0].submit(prompt=LONG)
    await asyncio.sleep(2 * SHORT_MS / 1000)
    assert await ids_pulled(workers[0], "w0") == []
    assert await ids_pulled(workers[1], "w1") == [job.job_id]


async def test_a_worker_that_waits_for_its_turn_hears_of_later_jobs_at_once(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 2)
    await holds(workers[1], "w1", LONG)
    await workers[0].submit(prompt=LONG)
    pulling = asyncio.create_task(workers[0].queue.pull("w0", 8, LEASE_MS))
    await until(lambda: _is_blocked(workers[0]))
    job = await workers[1].submit()
    assert [delivery.job.job_id for delivery in await pulling] == [job.job_id]


async def _is_blocked(steps: Steps) -> bool:
    return bool((await steps.redis.info("clients"))["blocked_clients"])


async def test_jobs_of_two_lanes_with_one_entry_id_are_told_apart(
    transport: RedisTransport,
) -> None:
    workers = await workers_of(transport, 2)
    await holds(workers[1], "w1", LONG)
    jobs = [await workers[0].submit(prompt=LONG), await workers[0].submit(prompt=OTHER, lane=1)]
    (_, other) = [await workers[0].hash(job.job_id) for job in jobs]
    first = (await workers[0].hash(jobs[0].job_id))["qid"]
    ((_, entry),) = await workers[0].redis.xrange(other["q"])
    await workers[0].redis.delete(other["q"])
    await workers[0].redis.xadd(other["q"], entry, id=first)
    await workers[0].queue.setup([jobs[0].model])
    await workers[0].redis.hset(workers[0].keys.job(jobs[1].job_id), "qid", first)
    assert await ids_pulled(workers[0], "w0") == [jobs[1].job_id]


async def test_with_a_wait_of_0_no_worker_is_preferred(transport: RedisTransport) -> None:
    workers = await workers_of(transport, 2, affinity_ms=0)
    await holds(workers[1], "w1", LONG)
    job = await workers[0].submit(prompt=LONG)
    assert await ids_pulled(workers[0], "w0") == [job.job_id]


async def test_a_worker_that_is_alone_finds_no_digests_in_the_queue(steps: Steps) -> None:
    await steps.worker("w1")
    job = await steps.submit(prompt=LONG)
    fields = await steps.hash(job.job_id)
    ((_, entry),) = await steps.redis.xrange(fields["q"])
    assert b"p" not in entry


async def test_what_a_worker_holds_is_forgotten_with_its_lease(steps: Steps) -> None:
    await steps.worker("w1")
    await holds(steps, "w1", LONG)
    key = steps.keys.prefixes("w1")
    assert 0 < await steps.redis.pttl(key) <= LEASE_MS
    await steps.queue.retire("w1")
    assert not await steps.redis.exists(key)
    assert await steps.queue.note_prefixes("w1", LEASE_MS, [b"12345678"], (), is_first=True) == -1


async def test_a_heartbeat_renews_what_a_worker_holds_and_returns_its_number(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    await holds(steps, "w1", LONG, 3)
    await steps.redis.pexpire(steps.keys.prefixes("w1"), LEASE_MS // 2)
    reply = await steps.queue.heartbeat(WorkerReport("w1", LEASE_MS, (MODEL,), {}, ()))
    assert (reply.num_workers, reply.num_prefixes) == (1, 3)
    assert await steps.redis.pttl(steps.keys.prefixes("w1")) > LEASE_MS // 2
