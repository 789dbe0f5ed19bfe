"""Jobs of several choices in a real worker: one prefill, then answers that go their own ways."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import Mapping

import pytest

from shared.choice_deltas import ChoiceDelta, segment_deltas
from shared.messages import FinishReason, JobState
from shared.transport.connect import RedisTransport
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.job_frontend import TIMEOUT_S, Frontend, Result, echo
from tests.integration.worker.test_worker import text_of
from tests.support.throttle import Throttle

PROMPT = list(range(40, 90))  # ordinary tokens
BLOCK_SIZE = 8
FULL_BLOCKS = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE  # tokens that a second choice finds
MODEL = {"RUNNER": "model", "DEVICE": "cpu", "CPU_TIER": "reference", "BLOCK_SIZE": BLOCK_SIZE}
LENGTH = FinishReason.LENGTH


def choices_of(result: Result) -> dict[int, ChoiceDelta]:
    """Each choice's whole answer, in order; asserts that it ended at most once, and last."""
    parts: dict[int, list[ChoiceDelta]] = defaultdict(list)
    for delta in result.deltas:
        for part in segment_deltas(delta):
            parts[part.choice].append(part)
    whole = {}
    for choice, own in sorted(parts.items()):
        assert all(part.finish_reason is None for part in own[:-1]), "it went on after its end"
        whole[choice] = own[-1]._replace(
            token_ids=tuple(token_id for part in own for token_id in part.token_ids),
            text="".join(part.text for part in own),
            logprobs=tuple(entry for part in own for entry in part.logprobs or ()),
        )
    return whole


async def idle_stats(transport: RedisTransport, generated_tokens: int) -> Mapping[str, float | str]:
    """What the one worker says of itself when it has generated so many tokens, nothing runs any
    more and all its blocks are free."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        statuses = await transport.registry.workers()
        if len(statuses) == 1:
            stats = statuses[0].stats
            has_run = float(stats["generated_tokens"]) >= generated_tokens
            is_free = stats["free_blocks"] == stats["total_blocks"]
            if has_run and is_free and stats["running"] == stats["jobs"] == stats["waiting"] == 0:
                return stats
        assert time.monotonic() < deadline_s, statuses
        await asyncio.sleep(0.02)


async def test_four_answers_to_one_prompt_differ_and_come_again_with_their_seed(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    await start_worker(**MODEL).ready()
    sampling = {"max_tokens": 24, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    result = await frontend.result(await frontend.submit(PROMPT, num_choices=4, **sampling))
    answers = choices_of(result)
    assert list(answers) == [0, 1, 2, 3]
    assert len({answer.token_ids for answer in answers.values()}) == 4
    for answer in answers.values():
        assert (len(answer.token_ids), answer.finish_reason) == (24, LENGTH)
        assert answer.text == await text_of(transport, frontend.model, list(answer.token_ids))
    usage = result.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 4 * 24)
    assert usage.cached_tokens == 0
    # Three choices found every full block of the prompt: it was computed once.
    stats = await idle_stats(transport, 4 * 24)
    assert stats["prefix_hit_tokens"] == 3 * FULL_BLOCKS
    again = await frontend.result(await frontend.submit(PROMPT, num_choices=4, **sampling))
    assert choices_of(again) == answers
    alone = await frontend.result(await frontend.submit(PROMPT, **sampling))
    assert tuple(alone.token_ids) == answers[0].token_ids


async def test_more_choices_than_places_all_end(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    await start_worker(MAX_NUM_SEQS=2).ready()
    job_id = await frontend.submit(PROMPT, num_choices=5, max_tokens=9)
    other = await frontend.submit(PROMPT[5:], max_tokens=9)
    answers = choices_of(await frontend.result(job_id))
    assert {choice: list(answer.token_ids) for choice, answer in answers.items()} == {
        choice: echo(PROMPT, 9) for choice in range(5)
    }
    assert (await frontend.result(other)).token_ids == echo(PROMPT[5:], 9)
    await idle_stats(transport, 6 * 9)


async def test_without_a_prefix_cache_every_choice_computes_the_prompt(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport
) -> None:
    await start_worker(PREFIX_CACHING="false").ready()
    answers = choices_of(await frontend.result(await frontend.submit(PROMPT, num_choices=3)))
    assert [list(answer.token_ids) for answer in answers.values()] == 3 * [echo(PROMPT, 20)]
    stats = await idle_stats(transport, 3 * 20)
    assert stats["prompt_tokens"] == 3 * len(PROMPT)
    assert stats["prefix_hit_tokens"] == 0


async def all_have_begun(frontend: Frontend, job_id: str, num_choices: int, tokens: int) -> None:
    """Returns when each choice has so many tokens in the log."""
    deadline_s = time.monotonic() + TIMEOUT_S
    result = Result()
    while True:
        begun = choices_of(result)
        if len(begun) == num_choices and all(
            len(answer.token_ids) >= tokens for answer in begun.values()
        ):
            return
        assert time.monotonic() < deadline_s, await frontend.store.get(job_id)
        await frontend.num_tokens(job_id, result.cursor.num_tokens + 1)
        result.read(await frontend.store.read_log(job_id, result.cursor))


async def test_a_cancelled_job_frees_the_blocks_of_every_choice(
    start_worker: StartWorker, frontend: Frontend, transport: RedisTransport, throttle: Throttle
) -> None:
    await start_worker(ECHO_STEP_MS=5).ready()
    throttle.apply(5)
    job_id = await frontend.submit(PROMPT, num_choices=4, max_tokens=400)
    await all_have_begun(frontend, job_id, 4, 2)
    await transport.store.cancel(job_id, "client")
    await idle_stats(transport, 4 * 2)
    assert (await frontend.result(job_id)).failed.state is JobState.CANCELLED


@pytest.mark.parametrize("how", ["killed", "drained"])
async def test_every_choice_resumes_exactly_at_another_worker(
    how: str,
    start_worker: StartWorker,
    frontend: Frontend,
    transport: RedisTransport,
    throttle: Throttle,
) -> None:
    first = await start_worker(**MODEL, DRAIN_TIMEOUT_S=0.1).ready()
    sampling = {
        "max_tokens": 40,
        "min_tokens": 16,
        "temperature": 0.9,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "seed": 5,
        "logprobs": 2,
        "stop": ("e",),
    }
    calm = await frontend.result(await frontend.submit(PROMPT, num_choices=3, **sampling))
    wanted = choices_of(calm)
    throttle.apply(10, step_s=5.0)  # none of them can end before it is released
    job_id = await frontend.submit(PROMPT, num_choices=3, **sampling)
    await all_have_begun(frontend, job_id, 3, 3)
    first.signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
    await first.ended()
    throttle.release()
    second = await start_worker(**MODEL).ready()
    result = await frontend.result(job_id)
    got = choices_of(result)
    assert {c: (a.token_ids, a.text, a[4:]) for c, a in got.items()} == {
        c: (a.token_ids, a.text, a[4:]) for c, a in wanted.items()
    }
    for choice, answer in got.items():
        assert [entry.token_id for entry in answer.logprobs or ()] == list(answer.token_ids)
        assert [entry.logprob for entry in answer.logprobs or ()] == pytest.approx(
            [entry.logprob for entry in wanted[choice].logprobs or ()], abs=1e-3
        )
    assert result.finished.reason is calm.finished.reason
    assert result.finished.usage.completion_tokens == calm.finished.usage.completion_tokens
    assert " job started " in second.log
    assert "resumed_tokens=0" not in second.log
    await idle_stats(transport, 1)
