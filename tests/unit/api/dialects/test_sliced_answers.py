"""What an answer sends: long payloads in pieces, and an error where it fails before its start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from api.dialects.completions.formatter import CompletionFormatter, CompletionShape
from api.generation.formatter import ResponseContext, Timing
from api.http.open_requests import OpenRequests
from api.http.shares import Pot
from api.http.sse import typed_event
from api.http.time_slices import PIECE_BYTES, TimeSlices
from api.jobs.attached_job import AttachedJob
from api.jobs.generation_response import generation_response
from api.jobs.reader_position import ResumePoint
from api.jobs.sent_events import SentEvents
from api.jobs.stream_response import EventStreamBody, StreamResponse
from api.jobs.tail import tail_response
from shared.messages import (
    START,
    Cursor,
    Delta,
    Finished,
    FinishReason,
    Job,
    JobState,
    OnDisconnect,
    SamplingParams,
    Segment,
    Usage,
)
from tests.unit.api.dialects.letter_tokenizer import LetterTokenizer
from tests.unit.api.dialects.response_logs import response_formatter

TOKENIZER = LetterTokenizer([b"<end>", b"a"])
PROMPT = "water " * 5000
JOB = Job(
    job_id="0-0198c0de-0000-7000-8000-000000000001",
    kind="completion",
    model="m",
    prompt_token_ids=(1,) * 5000,
    sampling=SamplingParams(max_tokens=4),
    num_choices=16,
)
END = Finished(START, FinishReason.STOP, Usage(5000, 0))


class LogStream:
    """An answer whose events are all there."""

    job_id = JOB.job_id
    cursor = START
    started_s = None
    num_waiting = 0

    def __init__(self, events: Sequence[Delta | Finished]) -> None:
        self._events = list(events)

    async def get(self, timeout_s: float) -> Delta | Finished:
        return self._events.pop(0)

    async def aclose(self) -> None: ...


async def done(*_: Any, **__: Any) -> None: ...


# Shared: hundreds of answers are made of each log, and a mock takes a millisecond to make.
ADMISSION, METRICS = MagicMock(), MagicMock()
DISCONNECTS = MagicMock(delivered=done, left=done)


def frontend_with(events: Sequence[Delta | Finished]) -> Any:
    stream = LogStream(events)

    async def opened(*_: Any, **__: Any) -> LogStream:
        return stream

    return SimpleNamespace(
        new_reader_id=lambda: "r",
        admission=ADMISSION,
        metrics=METRICS,
        keepalive_s=1.0,
        slices=TimeSlices(),
        open_requests=OpenRequests(limit=1),
        answers=Pot("answers", 2**20, what="answers", full="Full."),
        relay=SimpleNamespace(open=opened),
        disconnects=DISCONNECTS,
        store=SimpleNamespace(attach=done, get=done),
    )


async def sent_by(response: Any) -> list[Any]:
    """The messages of a response whose client stays."""
    messages: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        messages.append(message)

    await response({"type": "http", "path": "/generate", "state": {}}, receive, send)
    return messages


def echoing() -> CompletionFormatter:
    num_choices = JOB.num_choices
    made = ResponseContext(id="x-1", model="m", created_s=7, num_choices=num_choices)
    shape = CompletionShape(best_of=num_choices, n=num_choices, echoes=(PROMPT,))
    return CompletionFormatter(made, TOKENIZER, shape)


async def test_prompts_that_a_stream_repeats_are_written_in_pieces() -> None:
    response = generation_response(frontend_with([END]), (JOB,), echoing(), Timing(), streamed=True)
    bodies = [message["body"] for message in (await sent_by(response))[1:]]
    assert max(map(len, bodies)) < PIECE_BYTES + 2 * len(PROMPT)
    lines = [line for line in b"".join(bodies).split(b"\n") if line.startswith(b"data: {")]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    assert texts == [PROMPT] * JOB.num_choices + [""] * JOB.num_choices


class Broken(CompletionFormatter):
    """Its answer cannot be made, or cannot be encoded from its first byte on."""

    def __init__(self, *, is_made: bool) -> None:
        super().__init__(
            ResponseContext(id="x-1", model="m", created_s=7, num_choices=1), TOKENIZER
        )
        self._is_made = is_made

    def whole(self, end: Finished) -> Any:
        if self._is_made:
            return {"no JSON": object()}
        raise ValueError("broken")


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("prompt_tokens", [1, 100_000])  # encoded in one go, and in pieces
async def test_a_whole_answer_that_cannot_be_made_is_an_error_answer(
    is_made: bool, prompt_tokens: int
) -> None:
    end = Finished(START, FinishReason.STOP, Usage(prompt_tokens, 0))
    made = Broken(is_made=is_made)
    response = generation_response(frontend_with([end]), (JOB,), made, Timing(), streamed=False)
    start, body = await sent_by(response)
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal_error"


NUM_TOKENS = 4096  # of the longest log entry


def long_entry(num_choices: int) -> tuple[Delta, Finished]:
    """One entry of a step for each token, the choices in turn, and the end."""
    segments = tuple(Segment(index % num_choices, 1, 1) for index in range(NUM_TOKENS))
    end = Cursor(NUM_TOKENS, NUM_TOKENS)
    entry = Delta(START, end, (1,) * NUM_TOKENS, "a" * NUM_TOKENS, None, segments)
    return entry, Finished(end, FinishReason.STOP, Usage(1, NUM_TOKENS))


def record_with(num_choices: int) -> Any:
    return SimpleNamespace(
        job_id=JOB.job_id,
        state=JobState.FINISHED,
        on_disconnect=OnDisconnect.CONTINUE,
        num_choices=num_choices,
    )


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_tail_writes_a_long_entry_in_pieces_with_an_id_for_each_step(
    num_choices: int,
) -> None:
    frontend = frontend_with(long_entry(num_choices))
    response = tail_response(frontend, record_with(num_choices), ResumePoint())
    bodies = [message["body"] for message in (await sent_by(response))[1:]]
    assert max(map(len, bodies)) < 2 * PIECE_BYTES < sum(map(len, bodies))
    ids = [line for line in b"".join(bodies).split(b"\n") if line.startswith(b"id: ")]
    assert ids[:-1] == [b"id: " + str(Cursor(k, k)).encode() for k in range(1, NUM_TOKENS + 1)]


async def test_the_end_of_a_tail_is_one_write() -> None:
    """So a cut while it waits sends no error event behind an end that the client has."""
    response = tail_response(frontend_with(long_entry(1)), record_with(1), ResumePoint())
    *earlier, last = (await sent_by(response))[1:]
    assert b'"done":true' in last["body"]
    assert last["body"].endswith(b"data: [DONE]\n\n")
    assert not last["more_body"]
    assert not any(b'"done":true' in message["body"] for message in earlier)


def test_a_stored_response_keeps_nothing_of_what_its_reader_has() -> None:
    entry, _ = long_entry(1)
    events = SentEvents(response_formatter(), counts=False)
    assert b"".join(events.delta(entry, 0))
    events.mark_sent()
    assert events._place.in_order


def response_tail(frontend: Any) -> StreamResponse:
    """A stored response from its first event on."""
    source = AttachedJob(frontend, record_with(1))
    return StreamResponse(
        frontend, source, EventStreamBody(frontend, SentEvents(response_formatter()))
    )


async def test_a_replayed_response_writes_a_long_entry_in_pieces() -> None:
    entry, end = long_entry(1)
    in_one_go = response_formatter()
    events = [*in_one_go.opening(), *in_one_go.delta(entry)]
    expected = b"".join(map(typed_event, events))
    response = response_tail(frontend_with([entry, end]))
    bodies = [message["body"] for message in (await sent_by(response))[1:]]
    assert max(map(len, bodies)) < 2 * PIECE_BYTES < len(expected)
    assert b"".join(bodies).startswith(expected)
