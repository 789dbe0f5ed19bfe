"""Stored requests share their parts: each is there once, as long as a response needs it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shared.messages import Job
from shared.transport.record_parts import GROUP_PARTS
from tests.contract.shared.transport.test_dead_letters import again, poison
from tests.contract.shared.transport.test_held import HOUR_MS, held, own, refusal, set_memory  # noqa: F401
from tests.contract.shared.transport.test_restore import lose_everything, restore
from tests.support.jobs import LIMITS, make_job
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import Steps

TURNS = 2 * GROUP_PARTS + 5
MINUTE_MS = 60_000


def turn(number: int, name: str = "x") -> str:
    """Returns the record of a turn that repeats all lines of the turns before it."""
    lines = [f"{name} é {line} ".ljust(600, "y") for line in range(number)]
    return "\n".join([f"head of {name} {number}", *lines, "]}"])


async def parts_of(steps: Steps) -> dict[str, int]:
    """Returns the lives of all parts in milliseconds."""
    pattern = steps.keys.part("*")
    found = [key.decode() async for key in steps.redis.scan_iter(match=pattern, count=10_000)]
    return {key: await steps.redis.pttl(key) for key in found}


async def submit(steps: Steps, record: str, retain_ms: int = HOUR_MS, **job: Any) -> Job:
    return await steps.submit(request_record=record, retain_ms=retain_ms, **job)


async def forget(steps: Steps, *jobs: Job) -> None:
    for job in jobs:
        await steps.store.cancel(job.job_id, "cancelled")
        assert await steps.store.forget(job.job_id)


async def index_bytes(steps: Steps, job: Job) -> int:
    return int(await steps.redis.strlen(steps.keys.request_record(job.job_id)))


@pytest.mark.promise("Responses: the turns of a conversation share what they have in common")
async def test_a_conversation_that_is_sent_again_each_turn_is_stored_once(steps: Steps) -> None:
    jobs = [await submit(steps, turn(number)) for number in range(TURNS)]
    for number, job in enumerate(jobs):
        assert await steps.store.request_record(job.job_id) == turn(number)
    texts = [await steps.redis.strlen(key) for key in await parts_of(steps)]
    assert len(texts) == TURNS - 1 + (TURNS - 1) // GROUP_PARTS  # one for each line, and the groups
    assert sum(texts) < 1.2 * len(turn(TURNS).encode())
    assert max([await index_bytes(steps, job) for job in jobs]) < 40 * GROUP_PARTS
    indexes = [steps.keys.request_record(job.job_id) for job in jobs]
    taken = [await steps.redis.memory_usage(key) for key in (*await parts_of(steps), *indexes)]
    assert sum(taken) < sum(len(turn(number).encode()) for number in range(TURNS)) / 10
    whole = await steps.store.stored_bytes(jobs[-1].job_id)
    assert whole == len(turn(TURNS - 1).encode())
    await assert_every_key_expires(steps.redis, steps.keys.namespace)


async def test_equal_records_of_two_tenants_have_no_part_in_common(steps: Steps) -> None:
    await submit(steps, turn(40), tenant="a")
    of_one = await parts_of(steps)
    await submit(steps, turn(40), tenant="b")
    assert len(await parts_of(steps)) == 2 * len(of_one)


async def test_what_only_a_deleted_response_has_goes_with_it(steps: Steps) -> None:
    jobs = [await submit(steps, turn(number)) for number in (30, 40, 40, 50)]
    alone = await submit(steps, turn(10, "another"))
    before = await parts_of(steps)
    await forget(steps, alone)
    assert len(await parts_of(steps)) == len(before) - 10
    await forget(steps, jobs[3])
    assert len(await parts_of(steps)) == 41
    await forget(steps, jobs[0], jobs[1])
    assert await steps.store.request_record(jobs[2].job_id) == turn(40)
    await forget(steps, jobs[2])
    assert await parts_of(steps) == {}
    assert await held(steps) == 0


async def test_a_part_lives_as_long_as_the_last_response_that_has_it(steps: Steps) -> None:
    """A job may wait and run until its deadline, and is kept from then."""
    await submit(steps, turn(TURNS), retain_ms=MINUTE_MS, timeout_ms=MINUTE_MS)
    assert all(left > 2 * MINUTE_MS - 5000 for left in (await parts_of(steps)).values())
    await submit(steps, turn(TURNS), retain_ms=2 * HOUR_MS, timeout_ms=MINUTE_MS)
    assert all(left > 2 * HOUR_MS for left in (await parts_of(steps)).values())
    await submit(steps, turn(TURNS), retain_ms=MINUTE_MS, timeout_ms=MINUTE_MS)
    assert all(left > 2 * HOUR_MS for left in (await parts_of(steps)).values())


async def test_parts_are_kept_anew_by_an_end_after_the_deadline_and_by_a_renewal(
    steps: Steps,
) -> None:
    for action in ("end", "renew"):
        job = await submit(steps, turn(TURNS))
        if action == "renew":
            await steps.store.cancel(job.job_id, "cancelled")
        for key in await parts_of(steps):
            await steps.redis.pexpire(key, MINUTE_MS)
        if action == "end":
            await steps.store.cancel(job.job_id, "cancelled")
        else:
            await steps.store.renew([job.job_id])
        assert all(left > HOUR_MS - 5000 for left in (await parts_of(steps)).values()), action


async def test_turns_in_a_row_renew_few_parts(steps: Steps) -> None:
    await submit(steps, turn(TURNS))
    before = await parts_of(steps)
    await submit(steps, turn(TURNS))
    after = await parts_of(steps)
    assert all(after[key] <= before[key] for key in before)


@pytest.mark.parametrize("kind", ["group", "part of a group", "part"])
async def test_a_record_with_a_hole_is_no_record_and_the_next_turn_mends_it(
    steps: Steps, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = await submit(steps, turn(TURNS))
    index = (await steps.redis.get(steps.keys.request_record(job.job_id))).decode().split("\n")
    (group, *_) = [line[1:] for line in index if line.startswith("=")]
    (part, *_) = [line[1:] for line in index if line.startswith("-")]
    member = (await steps.redis.get(steps.keys.part(group)))[-20:].decode()
    lost = {"group": group, "part of a group": member, "part": part}[kind]
    assert await steps.redis.delete(steps.keys.part(lost)) == 1
    with caplog.at_level(logging.WARNING):
        assert await steps.store.request_record(job.job_id) is None
    assert "a part of a stored request is missing" in caplog.text
    # A worker runs it all the same.
    await steps.worker("w1")
    assert len(await steps.pull("w1")) == 1
    following = await submit(steps, turn(TURNS + 1))
    assert await steps.store.request_record(following.job_id) == turn(TURNS + 1)
    assert await steps.store.request_record(job.job_id) == turn(TURNS)


async def test_a_tenant_holds_each_part_once(steps: Steps) -> None:
    await submit(steps, turn(100))
    first = await held(steps)
    assert first > 60_000
    await submit(steps, turn(100))
    second = await held(steps) - first
    assert second < 0.2 * first
    kept = await steps.redis.hgetall(f"{steps.keys.prefix}kept:default")
    assert 60_000 < sum(map(int, kept.values())) < first
    # What is there already needs no room.
    await set_memory(steps, limit=100 * 2**20, used=90 * 2**20 - 30_000)
    assert await refusal(steps, request_record=turn(150), retain_ms=HOUR_MS) == "store"
    await submit(steps, turn(101), limits=LIMITS)


async def test_a_renewed_part_is_held_for_longer_and_not_twice(steps: Steps) -> None:
    await submit(steps, turn(100), retain_ms=MINUTE_MS)
    before = await steps.redis.hgetall(f"{steps.keys.prefix}kept:default")
    await submit(steps, turn(100), retain_ms=10 * HOUR_MS)
    after = await steps.redis.hgetall(f"{steps.keys.prefix}kept:default")
    assert sum(map(int, after.values())) == sum(map(int, before.values()))
    assert min(map(int, after)) > max(map(int, before)) + HOUR_MS


async def test_a_worker_puts_back_a_record_with_its_parts(steps: Steps) -> None:
    job = await submit(steps, turn(TURNS))
    await steps.worker("w1")
    (delivery,) = await steps.pull("w1")
    await lose_everything(steps)
    await restore(steps, delivery)
    assert await steps.store.request_record(job.job_id) == turn(TURNS)
    assert await parts_of(steps) == {}  # in one piece: it needs no other response


async def test_a_lost_job_is_accepted_again_with_its_parts(steps: Steps) -> None:
    job = await submit(steps, turn(TURNS))
    await lose_everything(steps)
    await steps.store.submit_again(job, MINUTE_MS)
    assert await steps.store.request_record(job.job_id) == turn(TURNS)
    assert await steps.store.submit_again(job, MINUTE_MS)
    await forget(steps, job)
    assert await parts_of(steps) == {}


async def test_a_dead_letter_has_its_record_in_one_piece(steps: Steps) -> None:
    job = await poison(steps, request_record=turn(TURNS), retain_ms=HOUR_MS)
    await steps.store.forget(job.job_id)
    assert await parts_of(steps) == {}
    letters = steps.transport.dead_letters
    assert await letters.request(job.job_id) == job
    new = again(job)
    assert await steps.store.requeue(job.job_id, new, LIMITS) == new.job_id
    assert await steps.store.request_record(new.job_id) == turn(TURNS)


async def test_records_of_older_releases_are_read(steps: Steps) -> None:
    """In one piece, of any size, and lines that are no index."""
    job = await submit(steps, "{}")
    for record in ("x" * 100_000, turn(TURNS)):
        await steps.redis.set(steps.keys.request_record(job.job_id), record, px=MINUTE_MS)
        assert await steps.store.request_record(job.job_id) == record
        assert await steps.store.stored_bytes(job.job_id) == len(record.encode())


async def test_a_record_that_looks_like_an_index_is_refused(steps: Steps) -> None:
    with pytest.raises(ValueError, match="'#'"):
        await steps.store.submit(make_job(request_record="#5\n-" + "a" * 20), LIMITS, "")


async def test_above_maxmemory_a_refused_turn_leaves_no_reference(
    own: Steps,  # noqa: F811
) -> None:
    first = await submit(own, turn(TURNS))
    await own.redis.config_set("maxmemory", 1)
    with pytest.raises(Exception, match="memory"):
        await submit(own, turn(TURNS + 1))
    await own.store.renew([first.job_id])
    await forget(own, first)
    assert await parts_of(own) == {}
