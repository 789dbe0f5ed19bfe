"""Batches: one owner at a time, fenced; every status follows one that may precede it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shared.messages import JobState, Usage
from shared.transport.connect import RedisTransport
from shared.transport.ports.batches import (
    BatchClaim,
    BatchEnd,
    BatchError,
    BatchesFull,
    BatchProgress,
    BatchStatus,
    LeaseLost,
    NewBatch,
    NoInput,
    new_batch_id,
)
from shared.transport.ports.files import FilePart
from tests.contract.shared.transport.batch_steps import LIMITS, new_batch, new_input
from tests.support.jobs import Stream
from tests.support.polling import until
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, Steps

LEASE_MS = 20_000
PROGRESS = BatchProgress(
    total=9,
    completed=3,
    failed=1,
    low_line=4,
    low_offset=77,
    done_bits=0b1010 << 100,
    model="org/tiny:1",
    usage=Usage(30, 12, 5),
    output=(FilePart("b.1.out", 300, "ab"),),
    error_output=(FilePart("b.1.err", 50, "cd"),),
)


async def claimed(
    transport: RedisTransport, frontend: str = "fe1", lease_ms: int = LEASE_MS
) -> BatchClaim:
    lease = await transport.batches.claim(frontend, lease_ms, [])
    assert lease is not None
    return lease


async def test_a_batch_is_created_once_and_read_by_its_owner_alone(
    transport: RedisTransport,
) -> None:
    batches = transport.batches
    file_id = await new_input(transport)
    requested = NewBatch(
        batch_id=new_batch_id(),
        tenant="default",
        endpoint="/v1/completions",
        input_file_id=file_id,
        window="24h",
        window_ms=86_400_000,
        metadata={"é": "{}"},
        output_life_ms=3_600_000,
    )
    made = await batches.create(requested, LIMITS)
    assert made.status is BatchStatus.VALIDATING
    assert made.metadata == {"é": "{}"}
    assert made.expires_ms - made.created_ms == 86_400_000
    assert made.progress == BatchProgress()
    assert await batches.create(requested, LIMITS) == made
    assert await batches.get(made.batch_id) == made
    assert await batches.get(made.batch_id, "other") is None
    assert await batches.get("batch_0-unknown") is None
    assert await batches.get(file_id) is None
    assert await batches.list("default", None, 9) == [made]
    assert await batches.list("other", None, 9) == []
    await assert_every_key_expires(transport.connections.commands, transport.keys.namespace)


async def test_a_batch_needs_a_file_of_its_own_tenant_and_purpose(
    transport: RedisTransport,
) -> None:
    with pytest.raises(NoInput) as absent:
        await new_batch(transport, "file-0-unknown")
    with pytest.raises(NoInput):
        await new_batch(transport, "nonsense")
    with pytest.raises(NoInput):
        await new_batch(transport, await new_input(transport, tenant="other"))
    output = await new_input(transport, purpose="batch_output")
    with pytest.raises(NoInput) as wrong:
        await new_batch(transport, output)
    assert (absent.value.purpose, wrong.value.purpose) == (None, "batch_output")


async def test_open_batches_are_bounded_in_all_and_per_tenant(transport: RedisTransport) -> None:
    two = dataclasses.replace(LIMITS, max_tenant_open=2)
    first = await new_batch(transport, limits=two)
    await new_batch(transport, limits=two)
    with pytest.raises(BatchesFull) as of_tenant:
        await new_batch(transport, limits=two)
    await new_batch(transport, tenant="other", limits=two)
    with pytest.raises(BatchesFull) as of_all:
        await new_batch(transport, limits=dataclasses.replace(LIMITS, max_open=3))
    assert (of_tenant.value.scope, of_all.value.scope) == ("tenant", "total")
    await transport.batches.cancel(first.batch_id, "default")
    await new_batch(transport, limits=two)


async def test_the_oldest_records_that_ended_make_place(transport: RedisTransport) -> None:
    two = dataclasses.replace(LIMITS, max_tenant_records=2)
    made = [await new_batch(transport, limits=two) for _ in range(2)]
    await transport.batches.cancel(made[0].batch_id, "default")
    made.append(await new_batch(transport, limits=two))
    made.append(await new_batch(transport, limits=two))
    listed = [batch.batch_id for batch in await transport.batches.list("default", None, 9)]
    assert sorted(listed) == sorted(batch.batch_id for batch in made[1:])  # open ones stay
    assert await transport.batches.get(made[0].batch_id) is None


async def test_pages_of_batches_go_on_after_the_last_one(transport: RedisTransport) -> None:
    ids = []
    redis: Any = transport.connections.commands
    for index in range(5):
        ids.append((await new_batch(transport)).batch_id)
        await redis.zadd(transport.keys.batches_of("default"), {ids[-1]: index})
    page = await transport.batches.list("default", ids[3], 2)
    assert [batch.batch_id for batch in page] == [ids[2], ids[1]]
    assert await transport.batches.list("default", "batch_0-unknown", 2) == []


async def test_one_frontend_at_a_time_runs_a_batch(transport: RedisTransport) -> None:
    batches = transport.batches
    made = await new_batch(transport)
    lease = await claimed(transport)
    assert lease == BatchClaim(made.batch_id, 1)
    assert await batches.claim("fe2", LEASE_MS, []) is None
    await batches.save(lease, 0)  # given back
    second = await claimed(transport, "fe2")
    assert second.fence == 2
    with pytest.raises(LeaseLost):
        await batches.save(lease, LEASE_MS, PROGRESS)
    with pytest.raises(LeaseLost):
        await batches.end(lease, BatchEnd(BatchStatus.COMPLETED))
    record = await batches.get(made.batch_id)
    assert record is not None
    assert record.progress == BatchProgress()
    await batches.save(second, LEASE_MS)


async def test_a_lease_that_ended_is_taken_over_with_the_progress(
    transport: RedisTransport,
) -> None:
    batches = transport.batches
    made = await new_batch(transport)
    lease = await claimed(transport, lease_ms=1)
    await batches.save(lease, LEASE_MS, PROGRESS, status=BatchStatus.IN_PROGRESS)
    assert await batches.claim("fe2", LEASE_MS, []) is None
    await batches.save(lease, 1)
    taken: list[BatchClaim] = []

    async def takes() -> bool:
        taken.extend(filter(None, [await batches.claim("fe2", LEASE_MS, [])]))
        return bool(taken)

    await until(takes)
    assert taken == [BatchClaim(made.batch_id, 2)]
    record = await batches.get(made.batch_id)
    assert record is not None
    assert (record.status, record.progress) == (BatchStatus.IN_PROGRESS, PROGRESS)


async def test_leases_that_ended_in_an_outage_of_the_server_mean_nothing(
    transport: RedisTransport,
) -> None:
    await new_batch(transport)
    await claimed(transport, lease_ms=1)
    redis: Any = transport.connections.commands
    await redis.hset(transport.keys.pulse, "at_ms", 1)  # nobody has spoken for long
    for _ in range(20):
        assert await transport.batches.claim("fe2", LEASE_MS, []) is None
    await redis.delete(transport.keys.pulse)

    async def takes() -> bool:
        return await transport.batches.claim("fe2", LEASE_MS, []) is not None

    await until(takes)


async def test_tenants_take_turns_and_unwanted_batches_are_left(transport: RedisTransport) -> None:
    redis: Any = transport.connections.commands
    made = []
    for age, tenant in enumerate(["a", "a", "a", "b", "b"]):
        made.append((await new_batch(transport, tenant=tenant)).batch_id)
        await redis.zadd(transport.keys.batches_open, {made[-1]: age})
    order = []
    while (lease := await transport.batches.claim("fe", LEASE_MS, [made[1]])) is not None:
        order.append(made.index(lease.batch_id))
    assert order == [0, 3, 2, 4]
    lease = await claimed(transport)
    assert lease.batch_id == made[1]


async def test_progress_is_stored_as_it_was_reported(transport: RedisTransport) -> None:
    batches = transport.batches
    made = await new_batch(transport)
    lease = await claimed(transport)
    saved = await batches.save(lease, LEASE_MS, PROGRESS, status=BatchStatus.IN_PROGRESS)
    assert saved.status is BatchStatus.IN_PROGRESS
    assert 86_000_000 < saved.left_ms <= 86_400_000
    again = await batches.save(lease, LEASE_MS, PROGRESS, status=BatchStatus.IN_PROGRESS)
    assert again.status is BatchStatus.IN_PROGRESS
    record = await batches.get(made.batch_id)
    assert record is not None
    assert record.progress == PROGRESS
    assert set(record.times_ms) == {BatchStatus.IN_PROGRESS}
    await assert_every_key_expires(transport.connections.commands, transport.keys.namespace)


async def test_the_end_makes_files_of_what_was_written(transport: RedisTransport) -> None:
    batches, files = transport.batches, transport.files
    input_file_id = await new_input(transport)
    made = await new_batch(transport, input_file_id)
    lease = await claimed(transport)
    await batches.save(lease, LEASE_MS, PROGRESS, status=BatchStatus.IN_PROGRESS)
    await batches.save(lease, LEASE_MS, status=BatchStatus.FINALIZING)
    end = BatchEnd(
        BatchStatus.COMPLETED,
        output=PROGRESS.output,
        error_output=PROGRESS.error_output,
        useless=["b.0.out"],
    )
    assert await batches.end(lease, end) is BatchStatus.COMPLETED
    assert await batches.end(lease, end) is BatchStatus.COMPLETED  # a lost reply
    with pytest.raises(LeaseLost):
        await batches.save(lease, LEASE_MS)
    record = await batches.get(made.batch_id)
    assert record is not None
    assert record.status is BatchStatus.COMPLETED
    assert record.output_file_id is not None
    assert record.error_file_id is not None
    output = await files.get(record.output_file_id, "default")
    assert output is not None
    assert (output.num_bytes, output.parts) == (300, PROGRESS.output)
    assert output.purpose == "batch_output"
    assert (await files.usage("default")).num_files == 3
    assert await files.sweep([], 9) == ["b.0.out"]
    assert await batches.claim("fe2", LEASE_MS, []) is None
    assert await files.drop(input_file_id, "default") is True
    await assert_every_key_expires(transport.connections.commands, transport.keys.namespace)


async def test_a_failed_batch_names_its_lines(transport: RedisTransport) -> None:
    made = await new_batch(transport)
    lease = await claimed(transport)
    errors = (BatchError("invalid_json_line", "é: no JSON", None, 3), BatchError("x", "y"))
    await transport.batches.end(lease, BatchEnd(BatchStatus.FAILED, errors))
    record = await transport.batches.get(made.batch_id)
    assert record is not None
    assert (record.status, record.errors) == (BatchStatus.FAILED, errors)
    assert record.output_file_id is None


async def test_a_batch_that_has_not_begun_is_cancelled_at_once(
    transport: RedisTransport,
) -> None:
    batches = transport.batches
    made = await new_batch(transport)
    assert await batches.cancel(made.batch_id, "other") is False
    for _ in range(2):
        assert await batches.cancel(made.batch_id, "default") is True
        record = await batches.get(made.batch_id)
        assert record is not None
        assert record.status is BatchStatus.CANCELLED
    assert await batches.claim("fe1", LEASE_MS, []) is None


async def test_a_cancel_wins_over_what_the_owner_wants_next(transport: RedisTransport) -> None:
    batches = transport.batches
    made = await new_batch(transport)
    lease = await claimed(transport)
    assert await batches.cancel(made.batch_id, "default") is True
    for status in (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING):
        saved = await batches.save(lease, LEASE_MS, PROGRESS, status=status)
        assert saved.status is BatchStatus.CANCELLING
    assert await batches.end(lease, BatchEnd(BatchStatus.COMPLETED)) is BatchStatus.CANCELLED


async def test_a_cancel_that_comes_too_late_changes_nothing(transport: RedisTransport) -> None:
    batches = transport.batches
    made = await new_batch(transport)
    lease = await claimed(transport)
    await batches.save(lease, LEASE_MS, status=BatchStatus.IN_PROGRESS)
    await batches.save(lease, LEASE_MS, status=BatchStatus.FINALIZING)
    await batches.cancel(made.batch_id, "default")
    assert await batches.end(lease, BatchEnd(BatchStatus.COMPLETED)) is BatchStatus.COMPLETED
    await batches.cancel(made.batch_id, "default")
    record = await batches.get(made.batch_id)
    assert record is not None
    assert record.status is BatchStatus.COMPLETED


async def test_the_records_of_saved_rows_expire_soon(steps: Steps) -> None:
    await new_batch(steps.transport)
    lease = await claimed(steps.transport)
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a", end=FINISHED)
    job_id = stream.job_id
    assert await steps.redis.pttl(steps.keys.job(job_id)) > 60_000
    await steps.transport.batches.save(lease, LEASE_MS, PROGRESS, job_ids=[job_id, "0-never-was"])
    for key in (steps.keys.job(job_id), steps.keys.log(job_id), steps.keys.prompt(job_id)):
        assert 0 < await steps.redis.pttl(key) <= 60_000
    assert await steps.redis.zscore(f"{steps.keys.prefix}texts:default", job_id) is None
    assert (await steps.hash(job_id))["state"] == JobState.FINISHED


async def test_a_lost_record_leaves_no_open_batch(transport: RedisTransport) -> None:
    made = await new_batch(transport)
    lease = await claimed(transport)
    redis: Any = transport.connections.commands
    await redis.delete(transport.keys.batch(made.batch_id))
    with pytest.raises(LeaseLost):
        await transport.batches.save(lease, LEASE_MS)
    with pytest.raises(LeaseLost):
        await transport.batches.end(lease, BatchEnd(BatchStatus.COMPLETED))
    assert await transport.batches.claim("fe1", LEASE_MS, []) is None
    assert await redis.exists(transport.keys.batches_open) == 0


async def test_open_batches_of_all_tenants_are_listed_newest_first(
    transport: RedisTransport,
) -> None:
    made = [await new_batch(transport, tenant=tenant) for tenant in ("acme", "other", "acme")]
    newest = sorted(made, key=lambda batch: (batch.created_ms, batch.batch_id), reverse=True)
    listed = await transport.batches.list_open(10)
    assert [batch.batch_id for batch in listed] == [batch.batch_id for batch in newest]
    assert [b.batch_id for b in await transport.batches.list_open(2)] == [
        batch.batch_id for batch in newest[:2]
    ]
    assert await transport.batches.cancel(made[1].batch_id, "other")
    left = {batch.batch_id for batch in await transport.batches.list_open(10)}
    assert left == {made[0].batch_id, made[2].batch_id}
