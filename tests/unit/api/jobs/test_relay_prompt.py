"""The log probabilities of a prompt are there before the first event of its job is given."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from api.generation.logprobs import ScoredPrompt
from api.jobs.event_stream import JobStream
from shared.messages import (
    PROMPT_SLICE_TOKENS,
    START,
    Delta,
    ErrorCode,
    Failed,
    JobState,
    PromptLogprob,
    PromptSlice,
    Usage,
)
from shared.prompt_logprobs import encode_prompt_logprobs
from shared.transport.ports.jobs import RESYNC, Submitted
from tests.unit.api.jobs.relay_fakes import FakeBus, FakeStore, finished_after, log_of, record_of
from tests.unit.api.jobs.test_relay import read_to_end, relay_over

TOKEN_IDS = tuple(range(2 * PROMPT_SLICE_TOKENS + 10))
ENTRIES = [PromptLogprob(token_id, -0.5, 2, ((1, -0.25),)) for token_id in TOKEN_IDS[1:]]
SLICES = [
    PromptSlice(index, encode_prompt_logprobs(ENTRIES[begin : begin + PROMPT_SLICE_TOKENS]))
    for index, begin in enumerate(range(0, len(ENTRIES), PROMPT_SLICE_TOKENS))
]
DELTAS = log_of(["a", "bc"])


async def opened(
    store: FakeStore, bus: FakeBus, live: Sequence[object], prompt: ScoredPrompt | None
) -> JobStream:
    async def accepted() -> Submitted:
        bus.subscription.items.extend(live)  # type: ignore[arg-type]
        return Submitted.ACCEPTED

    return await relay_over(store, bus).open("0-x", START, accepted, prompt=prompt)


@pytest.mark.parametrize("deltas", [DELTAS, []])
async def test_a_reader_that_wants_them_reads_the_log_before_its_first_event(
    deltas: list[Delta],
) -> None:
    end = finished_after(deltas)
    store, bus, prompt = FakeStore([*SLICES, *deltas, end]), FakeBus(), ScoredPrompt(TOKEN_IDS)
    stream = await opened(store, bus, [*deltas, end], prompt)
    first = await stream.get(1.0)
    assert prompt.is_complete, "before anything was given"
    assert list(prompt.all_entries()) == [None, *ENTRIES]
    if isinstance(first, Delta):
        rest, last = await read_to_end(stream)
        assert ([first, *rest], last) == (deltas, end)
    else:
        assert first == end


async def test_a_reader_that_does_not_passes_over_them() -> None:
    end = finished_after(DELTAS)
    store, bus = FakeStore([*SLICES, *DELTAS, end]), FakeBus()
    stream = await opened(store, bus, [RESYNC], None)
    assert await read_to_end(stream) == (DELTAS, end)


async def test_slices_are_taken_once_however_often_the_log_is_read() -> None:
    end = finished_after(DELTAS)
    store, bus, prompt = FakeStore([*SLICES, *DELTAS, end]), FakeBus(), ScoredPrompt(TOKEN_IDS)
    store.visible = 2
    stream = await opened(store, bus, [RESYNC], prompt)
    assert await stream.get(0.05) is None
    bus.subscription.items.append(RESYNC)
    store.visible = len(store.log)
    assert await read_to_end(stream) == (DELTAS, end)
    assert list(prompt.all_entries()) == [None, *ENTRIES]


async def test_a_log_without_them_ends_the_stream_of_who_wants_them() -> None:
    end = finished_after(DELTAS)
    store, bus = FakeStore([SLICES[0], *DELTAS, end]), FakeBus()
    stream = await opened(store, bus, [*DELTAS, end], ScoredPrompt(TOKEN_IDS))
    deltas, failed = await read_to_end(stream)
    assert deltas == []
    assert isinstance(failed, Failed)
    assert failed.code == ErrorCode.JOB_LOST


async def test_a_job_that_failed_before_scoring_reports_its_error() -> None:
    failed = Failed(START, JobState.FAILED, ErrorCode.ENGINE_ERROR, "no", Usage(3, 0))
    store, bus = FakeStore([SLICES[0], failed]), FakeBus()
    stream = await opened(store, bus, [failed], ScoredPrompt(TOKEN_IDS))
    assert await read_to_end(stream) == ([], failed)


async def test_the_end_of_a_job_whose_log_has_nothing_but_slices_comes_from_its_record() -> None:
    store, bus = FakeStore(SLICES), FakeBus()
    store.record = record_of(JobState.FAILED)
    stream = await opened(store, bus, [RESYNC], None)
    _, end = await read_to_end(stream)
    assert isinstance(end, Failed)
    assert end.state is JobState.FAILED


def test_parts_are_slices_and_the_first_has_the_first_token() -> None:
    prompt = ScoredPrompt(TOKEN_IDS)
    for part in (SLICES[0], SLICES[0], SLICES[2], SLICES[1], SLICES[2]):
        prompt.take(part)  # one that is here already, or comes too early, changes nothing
    assert prompt.is_complete
    tokens = [list(prompt.tokens(part)) for part in range(prompt.num_parts)]
    assert [len(part) for part in tokens] == [PROMPT_SLICE_TOKENS + 1, PROMPT_SLICE_TOKENS, 9]
    assert [token for part in tokens for token in part] == list(TOKEN_IDS)
    for part, ids in enumerate(tokens):
        known = [entry and entry.token_id for entry in prompt.entries(part)]
        assert known == [None if token == 0 else token for token in ids]
    alone = ScoredPrompt((7,))
    assert (alone.is_complete, list(alone.all_entries())) == (True, [None])
