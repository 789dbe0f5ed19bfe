"""Jobs that were prepared with other files than a worker of the same name has."""

from __future__ import annotations

from typing import Any

import pytest

from shared.messages import JobState
from shared.transport.ports.queue import AppendStatus, ModelFiles
from shared.transport.ports.registry import Order
from tests.support.jobs import Stream
from tests.support.transport_steps import Steps, other_process

OLD, NEW = ModelFiles("old-prompts", "old-weights"), ModelFiles("new-prompts", "new-weights")
TRAINED = ModelFiles("old-prompts", "new-weights")  # the same tokenizer and template


async def end_of(steps: Steps, job_id: str) -> tuple[str, str]:
    record = await steps.record(job_id)
    return record.state.value, record.reason


async def test_a_worker_takes_the_jobs_of_its_own_files(steps: Steps) -> None:
    await steps.worker("new", files=NEW)
    job = await steps.submit(prompt_digest=NEW.prompt_digest)
    assert [taken.job for taken in await steps.pull("new")] == [job]


@pytest.mark.parametrize("changes", [{}, {"num_choices": 3}, {"lane": 7}])
async def test_a_job_of_files_that_no_worker_has_ends_with_a_code(
    steps: Steps, changes: dict[str, Any]
) -> None:
    job = await steps.submit(prompt_digest=OLD.prompt_digest, **changes)
    await steps.worker("new", files=NEW)
    assert await steps.pull("new") == []
    assert await end_of(steps, job.job_id) == ("failed", "model_replaced")
    await steps.assert_counters_true()


async def test_two_workers_of_one_name_serve_their_own_jobs(steps: Steps) -> None:
    await steps.worker("old", files=OLD)
    await steps.worker("new", files=NEW)
    jobs = [
        await steps.submit(prompt_digest=files.prompt_digest, lane=lane)
        for lane, files in ((0, OLD), (0, NEW), (3, OLD), (0, OLD), (0, NEW))
    ]
    wanted = {
        name: {job.job_id for job in jobs if job.prompt_digest == files.prompt_digest}
        for name, files in (("old", OLD), ("new", NEW))
    }
    got: dict[str, set[str]] = {"old": set(), "new": set()}
    for _ in range(3):
        for name in ("new", "old"):
            process = other_process(steps.transport, defer_ms=0)
            await process.queue.setup(["org/tiny:1"])
            taken = [*await process.queue.recover(name, 8), *await process.pull(name)]
            got[name] |= {delivery.job.job_id for delivery in taken}
            assert all(delivery.crashes == 0 for delivery in taken)
    assert got == wanted
    await steps.assert_counters_true()


async def test_jobs_set_aside_end_when_the_last_worker_of_their_files_is_gone(
    steps: Steps,
) -> None:
    await steps.worker("old", files=OLD)
    await steps.worker("new", files=NEW)
    jobs = [await steps.submit(prompt_digest=OLD.prompt_digest) for _ in range(3)]
    new = other_process(steps.transport, defer_ms=0)
    await new.queue.setup(["org/tiny:1"])
    assert await new.pull("new") == []
    assert await new.queue.recover("new", 8) == []
    for job in jobs:
        record = await steps.record(job.job_id)
        assert record.state is JobState.QUEUED
    await steps.heartbeat("old", files=OLD, draining=True)  # it takes nothing any more
    assert await new.queue.recover("new", 8) == []
    for job in jobs:
        assert await end_of(steps, job.job_id) == ("failed", "model_replaced")
    assert not await steps.redis.exists(steps.keys.prefix + "aside")
    await steps.assert_counters_true()


@pytest.mark.parametrize("order", [Order.DRAIN, Order.EXIT])
async def test_jobs_wait_for_a_worker_that_an_operator_drains_and_not_for_one_that_exits(
    steps: Steps, order: Order
) -> None:
    await steps.worker("old", files=OLD)
    await steps.worker("new", files=NEW)
    await steps.registry.order("old", order)
    await steps.heartbeat("old", files=OLD, draining=True, order=order)
    job = await steps.submit(prompt_digest=OLD.prompt_digest)
    assert await steps.pull("new") == []
    assert await steps.queue.recover("new", 8) == []
    if order is Order.EXIT:
        assert await end_of(steps, job.job_id) == ("failed", "model_replaced")
        return
    assert (await steps.record(job.job_id)).state is JobState.QUEUED
    await steps.registry.order("old", Order.SERVE)
    await steps.heartbeat("old", files=OLD, order=Order.SERVE)
    (taken,) = await steps.queue.recover("old", 8)
    assert taken.job.job_id == job.job_id


async def test_a_job_resumes_only_with_the_weights_it_started_with(
    steps: Steps,
) -> None:
    await steps.worker("old", files=OLD)
    await steps.worker("twin", files=OLD)
    await steps.submit(prompt_digest=OLD.prompt_digest)
    old = other_process(steps.transport, defer_ms=0)
    await old.queue.setup(["org/tiny:1"])
    (delivery,) = await old.pull("old")
    stream = Stream(delivery)
    assert (await steps.say("old", stream, [5], "a")).status is AppendStatus.OK
    await steps.die("old")
    await steps.worker("trained", files=TRAINED)
    assert await steps.queue.recover("trained", 8) == []
    (taken,) = await steps.queue.recover("twin", 8)
    assert (taken.attempt, taken.output_token_ids, taken.crashes) == (2, (5,), 1)
    await steps.assert_counters_true()


async def test_an_output_of_weights_that_are_gone_ends_with_a_code(
    steps: Steps,
) -> None:
    await steps.worker("old", files=OLD)
    await steps.submit(prompt_digest=OLD.prompt_digest)
    (delivery,) = await steps.pull("old")
    await steps.say("old", Stream(delivery), [5], "a")
    await steps.die("old")
    await steps.worker("trained", files=TRAINED)
    assert await steps.queue.recover("trained", 8) == []
    assert await end_of(steps, delivery.job.job_id) == ("failed", "model_replaced")
    await steps.assert_counters_true()


async def test_other_weights_take_a_job_that_waits_or_has_no_output(
    steps: Steps,
) -> None:
    await steps.worker("old", files=OLD)
    await steps.submit(prompt_digest=OLD.prompt_digest)
    (begun,) = await steps.pull("old")
    waiting = await steps.submit(prompt_digest=OLD.prompt_digest)
    await steps.die("old")
    await steps.worker("trained", files=TRAINED)
    taken = [*await steps.queue.recover("trained", 8), *await steps.pull("trained")]
    assert {delivery.job.job_id for delivery in taken} == {begun.job.job_id, waiting.job_id}
    (first, _) = taken
    stream = Stream(first)
    await steps.say("trained", stream, [5], "a")
    assert (await steps.hash(stream.job_id))["weights_digest"] == TRAINED.weights_digest


@pytest.mark.parametrize("prompt_digest", ["", OLD.prompt_digest])
async def test_without_digests_every_worker_of_the_name_takes_a_job(
    steps: Steps, prompt_digest: str
) -> None:
    """Older releases send none: neither in jobs nor in heartbeats."""
    await steps.worker("any", files=NEW if not prompt_digest else ModelFiles())
    job = await steps.submit(prompt_digest=prompt_digest)
    assert [taken.job for taken in await steps.pull("any")] == [job]


async def test_a_job_that_kills_its_workers_is_blamed_although_others_set_it_aside(
    steps: Steps,
) -> None:
    await steps.worker("new", files=NEW)
    await steps.worker("spare", files=OLD)
    job = await steps.submit(prompt_digest=OLD.prompt_digest)
    for round_ in range(6):
        name = f"old{round_}"
        await steps.worker(name, files=OLD)
        process = other_process(steps.transport, defer_ms=0)
        await process.queue.setup(["org/tiny:1"])
        taken = [*await process.queue.recover(name, 8), *await process.pull(name)]
        if not taken:
            break
        await steps.die(name)
        await steps.queue.recover("new", 8)
    assert await end_of(steps, job.job_id) == ("failed", "poison")


ADAPTED = OLD._replace(adapters='{"ann": "ann-1", "bob": "bob-1"}')
RETRAINED = OLD._replace(adapters='{"ann": "ann-2", "bob": "bob-1"}')
MODELS = ("org/tiny:1", "ann", "bob")


async def test_an_adapters_output_continues_with_the_same_adapter_alone(steps: Steps) -> None:
    await steps.worker("first", MODELS, files=ADAPTED)
    jobs = [await steps.submit(model=name, prompt_digest=OLD.prompt_digest) for name in MODELS]
    for delivery in await steps.pull("first"):
        await steps.say("first", Stream(delivery), [5], "a")
    digests = [(await steps.hash(job.job_id))["weights_digest"] for job in jobs]
    assert digests == [OLD.weights_digest, "ann-1", "bob-1"]
    await steps.worker("retrained", MODELS, files=RETRAINED)
    await steps.die("first")
    await steps.worker("twin", MODELS, files=ADAPTED)
    taken = await steps.queue.recover("retrained", 8)
    assert {delivery.job.model for delivery in taken} == {"org/tiny:1", "bob"}
    (left,) = await steps.queue.recover("twin", 8)
    assert (left.job.model, left.crashes) == ("ann", 1)
    await steps.assert_counters_true()


async def test_an_adapters_output_ends_where_no_worker_has_its_adapter(steps: Steps) -> None:
    await steps.worker("first", MODELS, files=ADAPTED)
    job = await steps.submit(model="ann", prompt_digest=OLD.prompt_digest)
    (delivery,) = await steps.pull("first")
    await steps.say("first", Stream(delivery), [5], "a")
    await steps.worker("retrained", MODELS, files=RETRAINED)
    await steps.die("first")
    assert await steps.queue.recover("retrained", 8) == []
    assert await end_of(steps, job.job_id) == ("failed", "model_replaced")
