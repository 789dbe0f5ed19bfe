"""append: one engine step into the logs, fenced, idempotent, perhaps ending jobs."""

from __future__ import annotations

import math

import pytest

from shared.messages import (
    START,
    Cursor,
    Delta,
    Failed,
    Finished,
    FinishReason,
    JobState,
    TokenLogprob,
    Usage,
)
from shared.transport.ports.queue import AppendStatus, JobEnd
from tests.support.jobs import Stream
from tests.support.transport_steps import FINISHED, LEASE_MS, Steps, whole_log


async def test_appended_deltas_are_read_back_as_they_were(steps: Steps) -> None:
    stream = Stream(await steps.running())
    logprobs = (
        TokenLogprob(5, -0.25, ((5, -0.25), (9, -1.5))),
        TokenLogprob(6, -3.0, ((1, -0.5), (2, -math.inf))),
    )
    await steps.say("w1", stream, [5, 6], "h|é\n", logprobs=logprobs)
    await steps.say("w1", stream, [7], "")
    await steps.say("w1", stream, [8], "🙂")
    log = await whole_log(steps, stream.job_id)
    assert log == [
        Delta(START, Cursor(2, 5), (5, 6), "h|é\n", logprobs),
        Delta(Cursor(2, 5), Cursor(3, 5), (7,), ""),
        Delta(Cursor(3, 5), Cursor(4, 9), (8,), "🙂"),
    ]
    record = await steps.record(stream.job_id)
    assert record.completion_tokens == 4
    assert record.first_token_ms is not None


async def test_one_call_carries_a_step_of_many_jobs_and_answers_each(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    for _ in range(5):
        await steps.submit()
    streams = [Stream(delivery) for delivery in await steps.pull("w1")]
    items = [stream.append([index], "x") for index, stream in enumerate(streams)]
    broken = items[2]._replace(delta=items[2].delta._replace(end=Cursor(3, 1)))
    foreign = items[3]._replace(attempt=0)
    missing = items[4]._replace(job_id="0-nobody")
    results = await steps.queue.append(
        "w1", LEASE_MS, [items[0], items[1], broken, foreign, missing]
    )
    assert [result.status for result in results] == [
        AppendStatus.OK,
        AppendStatus.OK,
        AppendStatus.REJECTED,
        AppendStatus.FENCED,
        AppendStatus.GONE,
    ]
    assert await steps.queue.append("w1", LEASE_MS, []) == []


async def test_a_repeated_append_is_accepted_and_logged_once(steps: Steps) -> None:
    stream = Stream(await steps.running())
    item = stream.append([5], "x")
    for _ in range(3):
        (result,) = await steps.queue.append("w1", LEASE_MS, [item])
        assert result.status is AppendStatus.OK
    assert len(await whole_log(steps, stream.job_id)) == 1


async def test_a_gap_says_from_where_to_send_again(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5, 6], "ab")
    stream.accept(stream.append([7], "c"))  # believed said, but never arrived
    result = await steps.say("w1", stream, [8], "d")
    assert result.status is AppendStatus.GAP
    assert (result.num_tokens, result.num_bytes) == (2, 2)
    assert len(await whole_log(steps, stream.job_id)) == 1


async def test_a_longer_log_than_we_thought_is_a_gap_too(steps: Steps) -> None:
    delivery = await steps.running()
    stream, forgetful = Stream(delivery), Stream(delivery)
    await steps.say("w1", stream, [5], "a")
    result = await steps.say("w1", forgetful, [5, 6], "ab")
    assert (result.status, result.num_tokens) == (AppendStatus.GAP, 1)


@pytest.mark.parametrize(("token_id", "text"), [(6, "a"), (5, "bc")])
async def test_the_same_length_with_other_content_diverges(
    steps: Steps, token_id: int, text: str
) -> None:
    delivery = await steps.running()
    stream, other = Stream(delivery), Stream(delivery)
    await steps.say("w1", stream, [5], "a")
    other.accept(other.append([token_id], text))
    result = await steps.say("w1", other, [9], "z")
    assert (result.status, result.num_tokens) == (AppendStatus.DIVERGED, 1)
    assert len(await whole_log(steps, stream.job_id)) == 1


async def test_another_worker_cannot_speak_for_the_owner(steps: Steps) -> None:
    stream = Stream(await steps.running("w1"))
    await steps.worker("w2")
    result = await steps.say("w2", stream, [5], "a")
    assert result.status is AppendStatus.FENCED
    assert await whole_log(steps, stream.job_id) == []


async def test_the_last_delta_and_the_end_are_one_step(steps: Steps) -> None:
    stream = Stream(await steps.running())
    end = JobEnd(JobState.FINISHED, FinishReason.STOP, Usage(3, 2, 2), stop_reason="E|\u00e9ND")
    result = await steps.say("w1", stream, [5, 6], "ab", end=end)
    assert result.status is AppendStatus.OK
    log = await whole_log(steps, stream.job_id)
    assert log == [
        Delta(START, Cursor(2, 2), (5, 6), "ab"),
        Finished(Cursor(2, 2), FinishReason.STOP, Usage(3, 2, 2), "E|\u00e9ND"),
    ]
    record = await steps.record(stream.job_id)
    assert (record.state, record.reason, record.stop_reason) == ("finished", "stop", "E|\u00e9ND")
    assert (record.completion_tokens, record.cached_tokens) == (2, 2)
    assert isinstance(log[-1], Finished)
    assert log[-1].ended_ms == record.ended_ms is not None
    await steps.assert_counters_true()


async def test_held_back_text_comes_with_the_end_without_a_token(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a")
    result = await steps.say("w1", stream, [], "tail", end=FINISHED)
    assert result.status is AppendStatus.OK
    log = await whole_log(steps, stream.job_id)
    assert log[1] == Delta(Cursor(1, 1), Cursor(1, 5), (), "tail")
    assert isinstance(log[2], Finished)
    assert log[2].end == Cursor(1, 5)


async def test_an_end_without_any_token_is_logged(steps: Steps) -> None:
    stream = Stream(await steps.running())
    end = JobEnd(JobState.FAILED, "kv_capacity_exceeded", Usage(3, 0), message="Too | long.")
    assert (await steps.say("w1", stream, [], "", end=end)).status is AppendStatus.OK
    assert await whole_log(steps, stream.job_id) == [
        Failed(START, JobState.FAILED, "kv_capacity_exceeded", "Too | long.", Usage(3, 0))
    ]


async def test_a_repeated_end_is_accepted_and_another_is_not(steps: Steps) -> None:
    stream = Stream(await steps.running())
    item = stream.append([5], "a", end=FINISHED)
    for _ in range(2):
        (result,) = await steps.queue.append("w1", LEASE_MS, [item])
        assert result.status is AppendStatus.OK
    later = stream.append([5, 6], "ab", end=FINISHED)
    (result,) = await steps.queue.append("w1", LEASE_MS, [later])
    assert (result.status, result.detail) == (AppendStatus.ENDED, "finished:stop")
    assert len(await whole_log(steps, stream.job_id)) == 2
    stats = await steps.registry.queue_stats()
    assert stats.totals == {"finished": 1}


async def test_nothing_is_appended_after_the_end(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a")
    assert await steps.store.cancel(stream.job_id, "cancelled") is not None
    result = await steps.say("w1", stream, [6], "b", end=FINISHED)
    assert (result.status, result.detail) == (AppendStatus.ENDED, "cancelled:cancelled")
    log = await whole_log(steps, stream.job_id)
    assert [type(event) for event in log] == [Delta, Failed]


@pytest.mark.parametrize(
    "end",
    [
        JobEnd(JobState.CANCELLED, "cancelled", Usage(3, 0)),
        JobEnd(JobState.FINISHED, "because", Usage(3, 0)),
        JobEnd(JobState.FAILED, "", Usage(3, 0)),
        JobEnd(JobState.FAILED, "a|b", Usage(3, 0)),
        JobEnd(JobState.FAILED, "engine_error", Usage(3, 0), message="\ud800"),
    ],
)
async def test_an_end_that_no_reader_would_understand_is_rejected(
    steps: Steps, end: JobEnd
) -> None:
    stream = Stream(await steps.running())
    result = await steps.say("w1", stream, [5], "a", end=end)
    assert result.status is AppendStatus.REJECTED
    assert result.detail
    assert await whole_log(steps, stream.job_id) == []


async def test_an_empty_append_is_rejected(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a")
    item = stream.append([], "tail")
    (result,) = await steps.queue.append("w1", LEASE_MS, [item])
    assert result.status is AppendStatus.REJECTED


async def test_progress_renews_the_lease_and_never_shortens_it(steps: Steps) -> None:
    stream = Stream(await steps.running())
    lease = steps.keys.worker("w1")
    await steps.redis.pexpire(lease, 900)
    await steps.say("w1", stream, [5], "a")
    assert await steps.redis.pttl(lease) > LEASE_MS / 2
    await steps.queue.append("w1", 500, [stream.append([6], "b")])
    assert await steps.redis.pttl(lease) > LEASE_MS / 2


async def test_append_revives_no_lease(steps: Steps) -> None:
    """A worker that nobody replaced may go on; only a heartbeat makes it claim again."""
    stream = Stream(await steps.running())
    await steps.die("w1")
    assert (await steps.say("w1", stream, [5], "a")).status is AppendStatus.OK
    assert await steps.redis.exists(steps.keys.worker("w1")) == 0


async def test_the_first_attempts_cached_tokens_stay(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a", cached_tokens=2)
    await steps.say("w1", stream, [6], "b", cached_tokens=0)
    (again,) = await steps.queue.reconcile("w1", frozenset())
    assert again.cached_tokens == 2


async def test_scripts_forgotten_by_the_server_are_loaded_again(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.redis.script_flush()
    assert (await steps.say("w1", stream, [5], "a")).status is AppendStatus.OK
