"""A prompt's log probabilities in the log of a real worker: each once, whatever happens to it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shared.messages import (
    PROMPT_SLICE_TOKENS,
    START,
    Delta,
    Finished,
    PromptSlice,
    num_slices_of,
)
from shared.prompt_logprobs import decode_prompt_logprobs
from shared.transport.connect import RedisTransport
from tests.integration.worker.conftest import StartWorker
from tests.integration.worker.job_frontend import Frontend, echo
from tests.support.checkpoints import make_checkpoint
from tests.support.polling import until
from tests.support.throttle import Throttle

PROMPT = [token % 300 for token in range(2 * PROMPT_SLICE_TOKENS + 100)]
NUM_SLICES = num_slices_of(len(PROMPT) - 1)


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    return make_checkpoint(path, max_position_embeddings=4096)


async def slices_of(transport: RedisTransport, job_id: str) -> list[PromptSlice]:
    events = await transport.store.read_log(job_id, START, 1000)
    return [event for event in events if isinstance(event, PromptSlice)]


async def slices_logged(transport: RedisTransport, job_id: str, at_least: int) -> None:
    found: list[PromptSlice] = []

    async def look() -> bool:
        found[:] = await slices_of(transport, job_id)
        return len(found) >= at_least

    for _ in range(20_000):
        if await look():
            return
    raise AssertionError(f"only {len(found)} slices")


async def check_log(transport: RedisTransport, job_id: str, num_tokens: int) -> None:
    """Everything once and in order: slices, deltas, the end."""
    events = await transport.store.read_log(job_id, START, 1000)
    slices = [event for event in events if isinstance(event, PromptSlice)]
    assert events[: len(slices)] == slices
    assert [part.index for part in slices] == list(range(NUM_SLICES))
    scored = [entry for part in slices for entry in decode_prompt_logprobs(part.entries)]
    assert [entry.token_id for entry in scored] == PROMPT[1:]
    assert all((entry.logprob, entry.rank, len(entry.top)) == (0.0, 1, 2) for entry in scored)
    tokens = [t for event in events if isinstance(event, Delta) for t in event.token_ids]
    assert tokens == echo(PROMPT, num_tokens)
    assert isinstance(events[-1], Finished)


async def test_a_prompt_is_scored_in_slices_before_the_first_token(
    start_worker: StartWorker,
    frontend: Frontend,
    transport: RedisTransport,
    long_checkpoint: Path,
) -> None:
    await start_worker(MODEL=long_checkpoint).ready()
    for num_tokens, num_choices in ((5, 1), (0, 1), (0, 3)):
        job_id = await frontend.submit(
            PROMPT, max_tokens=num_tokens, prompt_logprobs=2, num_choices=num_choices
        )
        result = await frontend.result(job_id)
        await check_log(transport, job_id, num_tokens)
        assert isinstance(result.end, Finished)
        assert result.end.usage.completion_tokens == num_tokens
        assert result.end.usage.cached_tokens == 0


@pytest.mark.promise(
    "Clients: log probabilities of the prompt equal those of transformers' forward to 1e-3, each "
    "once and in order, with any cache, preemption or failure (float32; bfloat16 and int8 tiers as "
    "close as the reference tier)"
)
async def test_a_prompt_is_scored_once_though_its_worker_dies(
    start_worker: StartWorker,
    frontend: Frontend,
    transport: RedisTransport,
    long_checkpoint: Path,
    throttle: Throttle,
) -> None:
    settings = {"MODEL": long_checkpoint, "MAX_NUM_BATCHED_TOKENS": 64, "ECHO_STEP_MS": 60}
    first = await start_worker(**settings).ready()
    job_id = await frontend.submit(PROMPT, max_tokens=40, prompt_logprobs=2)
    await slices_logged(transport, job_id, 1)
    first.signal(signal.SIGKILL)
    await first.ended()
    assert 1 <= len(await slices_of(transport, job_id)) < NUM_SLICES, "in the middle of its prompt"
    throttle.apply(5)
    second = await start_worker(MODEL=long_checkpoint).ready()
    await frontend.num_tokens(job_id, 5)
    scored = await slices_of(transport, job_id)
    second.signal(signal.SIGKILL)
    await second.ended()
    throttle.release()
    third = await start_worker(MODEL=long_checkpoint).ready()
    await frontend.result(job_id)
    await check_log(transport, job_id, 40)
    assert await slices_of(transport, job_id) == scored, "what has output is not scored again"
    await until(lambda: " job ended " in third.log, "the end")


async def test_what_the_server_has_lost_is_written_again_with_its_slices(
    start_worker: StartWorker,
    frontend: Frontend,
    transport: RedisTransport,
    long_checkpoint: Path,
    throttle: Throttle,
) -> None:
    first = await start_worker(MODEL=long_checkpoint).ready()
    throttle.apply(5)
    job_id = await frontend.submit(PROMPT, max_tokens=40, prompt_logprobs=2)
    await frontend.num_tokens(job_id, 5)
    first.signal(signal.SIGKILL)
    await first.ended()
    await start_worker(MODEL=long_checkpoint).ready()  # which has scored nothing itself
    await frontend.num_tokens(job_id, 6)
    keys = [transport.keys.job(job_id), transport.keys.log(job_id)]
    await transport.connections.commands.delete(*keys)
    throttle.release()
    await frontend.result(job_id)
    await check_log(transport, job_id, 40)
