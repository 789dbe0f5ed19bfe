"""What an answer sends: long payloads in pieces, and an error where it fails before its start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from api.answering import GenerationResponse
from api.open_requests import OpenRequests
from api.openai.answer import AnswerFacts
from api.openai.completion_dialect import CompletionDialect, CompletionShape
from api.time_slices import PIECE_BYTES, TimeSlices
from api.timing import Timing
from shared.messages import START, Delta, Finished, FinishReason, Job, SamplingParams, Usage
from tests.unit.api.letter_tokenizer import LetterTokenizer

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


def frontend_with(events: Sequence[Delta | Finished]) -> Any:
    departures = MagicMock(delivered=AsyncMock(), left=AsyncMock())
    return SimpleNamespace(
        new_reader_id=lambda: "r",
        metrics=MagicMock(),
        settings=SimpleNamespace(keepalive_s=1.0),
        slices=TimeSlices(),
        open_requests=OpenRequests(limit=1),
        relay=SimpleNamespace(open=AsyncMock(return_value=LogStream(events))),
        departures=departures,
        store=SimpleNamespace(attach=AsyncMock()),
    )


async def sent_by(response: Any) -> list[Any]:
    """The messages of a response whose client stays."""
    messages: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        messages.append(message)

    await response({"type": "http", "state": {}}, receive, send)
    return messages


def echoing() -> CompletionDialect:
    num_choices = JOB.num_choices
    made = AnswerFacts(id="x-1", model="m", created_s=7, num_choices=num_choices)
    shape = CompletionShape(best_of=num_choices, n=num_choices, echoes=(PROMPT,))
    return CompletionDialect(made, TOKENIZER, shape)


async def test_prompts_that_a_stream_repeats_are_written_in_pieces() -> None:
    response = GenerationResponse(frontend_with([END]), JOB, echoing(), Timing(), streamed=True)
    bodies = [message["body"] for message in (await sent_by(response))[1:]]
    assert max(map(len, bodies)) < PIECE_BYTES + 2 * len(PROMPT)
    lines = [line for line in b"".join(bodies).split(b"\n") if line.startswith(b"data: {")]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    assert texts == [PROMPT] * JOB.num_choices + [""] * JOB.num_choices


class Broken(CompletionDialect):
    """Its answer cannot be made, or cannot be encoded from its first byte on."""

    def __init__(self, *, is_made: bool) -> None:
        super().__init__(AnswerFacts(id="x-1", model="m", created_s=7, num_choices=1), TOKENIZER)
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
    response = GenerationResponse(frontend_with([end]), JOB, made, Timing(), streamed=False)
    start, body = await sent_by(response)
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal_error"
