"""The prompt's log probabilities in the log: before the first delta, each slice once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shared.messages import START, Cursor, Delta, PromptLogprob, PromptSlice, SamplingParams
from shared.prompt_logprobs import decode_prompt_logprobs, encode_prompt_logprobs
from shared.transport.ports.queue import Append, AppendResult, AppendStatus
from tests.support.jobs import Stream
from tests.support.transport_steps import FINISHED, LEASE_MS, Steps, whole_log

SCORED = SamplingParams(max_tokens=64, seed=7, prompt_logprobs=2)
NOTHING = Delta(START, START, (), "")


def slice_of(stream: Stream, index: int, entries: bytes = b"[]") -> Append:
    part = PromptSlice(index, entries)
    return Append(stream.job_id, stream.attempt, NOTHING, "", "", prompt_slice=part)


async def say(steps: Steps, worker_id: str, *items: Append) -> Sequence[AppendResult]:
    return await steps.queue.append(worker_id, LEASE_MS, items)


async def statuses(steps: Steps, worker_id: str, *items: Append) -> list[AppendStatus]:
    return [result.status for result in await say(steps, worker_id, *items)]


def behind(item: Append, num_slices: int) -> Append:
    return item._replace(num_prompt_slices=num_slices)


async def test_slices_are_read_back_before_the_first_delta(steps: Steps) -> None:
    stream = Stream(await steps.running(sampling=SCORED))
    entries = [
        PromptLogprob(2, -0.25, 1, ((2, -0.25), (9, -1.5))),
        PromptLogprob(3, -math.inf, 7, ((1, -0.5),)),
    ]
    parts = [encode_prompt_logprobs(entries), encode_prompt_logprobs(entries[:1])]
    items = [slice_of(stream, index, part) for index, part in enumerate(parts)]
    assert await statuses(steps, "w1", *items) == [AppendStatus.OK] * 2
    item = behind(stream.append([5], "x", FINISHED), 2)
    assert await statuses(steps, "w1", item) == [AppendStatus.OK]
    first, second, delta, end = await whole_log(steps, stream.job_id)
    assert (first, second) == (PromptSlice(0, parts[0]), PromptSlice(1, parts[1]))
    assert decode_prompt_logprobs(parts[0]) == entries
    assert isinstance(delta, Delta)
    assert (delta.start, delta.end) == (START, Cursor(1, 1))
    assert await steps.store.read_log(stream.job_id, Cursor(0, 1)) == [second, delta, end]
    assert await steps.store.read_log(stream.job_id, Cursor(1, 1)) == [end]


async def test_a_repeated_slice_is_logged_once_and_a_missing_one_is_a_gap(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running(sampling=SCORED))
    assert await statuses(steps, "w1", slice_of(stream, 1)) == [AppendStatus.GAP]
    for _ in range(2):
        assert await statuses(steps, "w1", slice_of(stream, 0)) == [AppendStatus.OK]
    assert await whole_log(steps, stream.job_id) == [PromptSlice(0, b"[]")]


async def test_no_delta_and_no_end_comes_before_the_slices_it_follows(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running(sampling=SCORED))
    assert await statuses(steps, "w1", slice_of(stream, 0)) == [AppendStatus.OK]
    delta = behind(stream.append([5], "x"), 2)
    (result,) = await say(steps, "w1", delta)
    assert (result.status, result.num_tokens, result.num_bytes) == (AppendStatus.GAP, 0, 0)
    end = behind(Append(stream.job_id, stream.attempt, NOTHING, "", "", FINISHED), 2)
    assert await statuses(steps, "w1", end) == [AppendStatus.GAP]
    items = [slice_of(stream, 1), delta]
    assert await statuses(steps, "w1", *items) == [AppendStatus.OK] * 2


async def test_an_older_attempt_scores_nothing_and_a_newer_one_goes_on(
    steps: Steps,
) -> None:
    old = Stream(await steps.running(sampling=SCORED))
    assert await statuses(steps, "w1", slice_of(old, 0, b"[1]")) == [AppendStatus.OK]
    await steps.die("w1")
    await steps.worker("w2")
    (delivery,) = await steps.queue.recover("w2", 8)
    new = Stream(delivery)
    assert delivery.prompt_slices == (), "without output the prompt is computed again"
    assert await statuses(steps, "w1", slice_of(old, 1)) == [AppendStatus.FENCED]
    # A slice is the same part of the prompt, whoever wrote it: it is left as it was.
    items = [slice_of(new, 0, b"[2]"), slice_of(new, 1, b"[2]")]
    assert await statuses(steps, "w2", *items) == [AppendStatus.OK] * 2
    output = behind(new.append([5], "x"), 2)
    assert await statuses(steps, "w2", output) == [AppendStatus.OK]
    slices = [PromptSlice(0, b"[1]"), PromptSlice(1, b"[2]")]
    assert (await whole_log(steps, new.job_id))[:2] == slices
    await steps.die("w2")
    await steps.worker("w3")
    (delivery,) = await steps.queue.recover("w3", 8)
    assert list(delivery.prompt_slices) == slices
    assert delivery.end == Cursor(1, 1)


async def test_a_job_that_was_put_back_has_no_slices_until_they_are_written_again(
    steps: Steps,
) -> None:
    delivery = await steps.running(sampling=SCORED)
    stream = Stream(delivery)
    assert await statuses(steps, "w1", slice_of(stream, 0)) == [AppendStatus.OK]
    await steps.redis.flushdb()
    await steps.worker("w1")
    assert delivery.snapshot is not None
    await steps.queue.restore("w1", stream.job_id, stream.attempt, delivery.snapshot, 0)
    assert await statuses(steps, "w1", behind(stream.append([5], "x"), 1)) == [AppendStatus.GAP]
    assert await statuses(steps, "w1", slice_of(stream, 0)) == [AppendStatus.OK]
    assert await whole_log(steps, stream.job_id) == [PromptSlice(0, b"[]")]


async def test_a_different_slice_is_rejected(steps: Steps) -> None:
    stream = Stream(await steps.running(sampling=SCORED))
    item = stream.append([5], "x")._replace(prompt_slice=PromptSlice(0, b"[]"))
    assert await statuses(steps, "w1", item) == [AppendStatus.REJECTED]
