"""A stream that its frontend cuts, at any of its writes: what was sent and the place that is named
make up the answer, and everything that was written is whole events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from api.dialects.completions.formatter import CompletionFormatter, CompletionShape
from api.generation.formatter import ResponseContext, Timing
from api.generation.logprobs import ScoredPrompt
from api.http.sse import BEHIND_KEEPALIVE, KEEPALIVE
from api.jobs.generation_response import generation_response
from api.jobs.reader_position import ResumePoint
from api.jobs.stream_response import StreamResponse
from api.jobs.tail import tail_response
from shared.messages import (
    START,
    Cursor,
    Delta,
    Finished,
    FinishReason,
    SamplingParams,
    Segment,
    Usage,
)
from tests.unit.api.dialects.response_logs import response_formatter
from tests.unit.api.dialects.test_sliced_answers import (
    JOB,
    TOKENIZER,
    LogStream,
    frontend_with,
    record_with,
    response_tail,
)
from tests.unit.api.jobs.test_relay_prompt import SLICES, TOKEN_IDS

PROMPT = "p" * 40
SCORED = SamplingParams(max_tokens=400, prompt_logprobs=1, logprobs=0)
Events = Sequence[Delta | Finished]
MakeResponse = Callable[[Any, Events], Any]


class Reader(LogStream):
    """Knows how far it has got."""

    async def get(self, timeout_s: float) -> Delta | Finished:
        event = await super().get(timeout_s)
        if isinstance(event, Delta):
            self.cursor = event.end
        return event


def frontend_over(events: Events) -> Any:
    frontend = frontend_with(events)
    reader = Reader(events)

    async def opened(*_: Any, **__: Any) -> Reader:
        return reader

    frontend.relay.open = opened
    return frontend


async def written(response: Any, frontend: Any, cut_at: int | None = None) -> list[bytes]:
    """What a client gets that takes nothing more from write `cut_at` on until the frontend cuts
    its answers. As with uvicorn a write waits before any of it is written."""
    bodies: list[bytes] = []
    num_writes = 0

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal num_writes
        if message["type"] != "http.response.body":
            return
        num_writes += 1
        if num_writes - 1 == cut_at:
            frontend.open_requests.cut_all()
            await asyncio.sleep(0)
        bodies.append(message["body"])

    await response({"type": "http", "path": "/generate", "state": {}}, receive, send)
    return bodies


async def cut_everywhere(events: Events, make: MakeResponse) -> list[list[bytes]]:
    """What clients get of the same answer, cut at each of its writes."""
    frontend = frontend_over(events)
    whole = await written(make(frontend, events), frontend)
    cut = []
    for cut_at in range(len(whole)):
        frontend = frontend_over(events)
        cut.append(await written(make(frontend, events), frontend, cut_at))
    return cut


def payloads_of(bodies: Sequence[bytes]) -> list[Any]:
    """The events' payloads. Raises ValueError where one is no JSON."""
    output = []
    for block in b"".join(bodies).decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line.startswith("data: ")]
        assert len(lines) <= 1
        output += [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    return output


def text_of(payloads: Sequence[Any]) -> str:
    return "".join(choice["text"] for payload in payloads for choice in payload["choices"])


def resume_point_of(error: Any) -> ResumePoint:
    found = re.search(r"'Last-Event-ID: ([^']+)' continues", error["error"]["message"])
    assert found is not None
    return ResumePoint.parse(found[1])


def log_of(sizes: Sequence[int]) -> list[Delta | Finished]:
    """Entries of so many tokens, a step for each; and the end."""
    log: list[Delta | Finished] = []
    cursor = START
    for size in sizes:
        segments = (Segment(0, 1, 1),) * size
        end = Cursor(cursor.num_tokens + size, cursor.num_bytes + size)
        log.append(Delta(cursor, end, (1,) * size, "a" * size, None, segments))
        cursor = end
    num_tokens = cursor.num_tokens
    return [*log, Finished(cursor, FinishReason.STOP, Usage(len(TOKEN_IDS), num_tokens))]


def completion(*, is_scored: bool = False, interval: int | None = None) -> MakeResponse:
    """Makes streamed answers; a scored prompt is repeated with its log probabilities."""

    def make(frontend: Any, events: Events) -> StreamResponse:
        made = ResponseContext(id="x", model="m", created_s=7)
        shape, prompt = CompletionShape(best_of=1, n=1), None
        sampling = SamplingParams(max_tokens=400)
        if is_scored:
            prompt, sampling = ScoredPrompt((1,) * len(TOKEN_IDS)), SCORED
            for part in SLICES:
                prompt.take(part)
            made = ResponseContext(id="x", model="m", created_s=7, num_logprobs=0)
            shape = CompletionShape(best_of=1, n=1, echoes=(PROMPT,), scored=(prompt,))
        job = replace(JOB, prompt_token_ids=TOKEN_IDS, sampling=sampling, num_choices=1)
        return generation_response(
            frontend,
            (job,),
            CompletionFormatter(made, TOKENIZER, shape),
            Timing(),
            streamed=True,
            stream_interval=interval,
            prompts=(prompt,),
        )

    return make


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written in pieces is written a part at a time."""
    monkeypatch.setattr("api.http.time_slices.PIECE_BYTES", 1)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("interval", [None, 4, 4096])
@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2, 1, 1, 3, 1, 1), (2, 130, 1)])
async def test_a_reader_goes_on_where_what_was_written_ends(
    sizes: tuple[int, ...], is_scored: bool, interval: int | None
) -> None:
    make = completion(is_scored=is_scored, interval=interval)
    for bodies in await cut_everywhere(log_of(sizes), make):
        *output, error = payloads_of(bodies)
        text = text_of(output).removeprefix(PROMPT)
        assert resume_point_of(error) == ResumePoint(Cursor(len(text), len(text)))


@pytest.mark.usefixtures("small_pieces")
async def test_an_end_is_cut_between_events() -> None:
    """Without tokens a prompt is told by the end."""
    all_cut = await cut_everywhere(log_of(()), completion(is_scored=True))
    assert len(all_cut) > 3, "in pieces"
    for bodies in all_cut:
        *output, error = payloads_of(bodies)
        assert error["error"]["code"] == "frontend_draining"
        assert resume_point_of(error) == ResumePoint()
        assert all("choices" in payload for payload in output)


def response(frontend: Any, events: Events) -> StreamResponse:
    end = events[-1]
    sampling = SamplingParams(max_tokens=400)
    asked = replace(JOB, prompt_token_ids=TOKEN_IDS, sampling=sampling, num_choices=1)
    job = replace(asked, kind="response", request_record="{}")
    assert isinstance(end, Finished)
    return generation_response(frontend, (job,), response_formatter(), Timing(), streamed=True)


def response_again(frontend: Any, events: Events) -> StreamResponse:
    return response_tail(frontend)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("make", [response, response_again])
async def test_a_response_goes_on_behind_its_last_event_that_was_written(
    make: MakeResponse,
) -> None:
    log = log_of((1, 130, 2))
    end = Finished(Cursor(133, 133), FinishReason.STOP, Usage(100_000, 133))
    for bodies in await cut_everywhere([*log[:-1], end], make):
        *output, error = payloads_of(bodies)
        numbers = [payload["sequence_number"] for payload in output]
        assert numbers == list(range(len(output)))
        assert error["sequence_number"] == max(0, len(output) - 1)
        if output:
            assert f"&starting_after={len(output) - 1} continues from here" in error["message"]
        else:
            assert "?stream=true continues from here" in error["message"]


@pytest.mark.usefixtures("small_pieces")
async def test_a_tail_resumes_after_its_last_written_event() -> None:
    def make(frontend: Any, events: Events) -> StreamResponse:
        return tail_response(frontend, record_with(1), ResumePoint())

    for bodies in await cut_everywhere(log_of((1, 130, 2)), make):
        *output, error = payloads_of(bodies)
        num_bytes = sum(len(payload["text"]) for payload in output)
        assert resume_point_of(error) == ResumePoint(Cursor(num_bytes, num_bytes))


async def test_a_farewell_in_the_place_of_an_event_keeps_its_distance_to_a_comment() -> None:
    frontend = frontend_over(log_of((1, 1)))
    frontend.keepalive_s = 0.0
    bodies = await written(completion()(frontend, ()), frontend, cut_at=1)
    assert bodies[0] == KEEPALIVE
    assert bodies[1].startswith(BEHIND_KEEPALIVE)


@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize("sizes", [(1,) * 10, (1, *(200,) * 9)])
async def test_a_stream_that_holds_its_tokens_is_kept_alive(
    sizes: tuple[int, ...], is_scored: bool
) -> None:
    frontend = frontend_over(log_of(sizes))
    frontend.keepalive_s = 0.0
    make = completion(is_scored=is_scored, interval=4096)
    bodies = await written(make(frontend, ()), frontend)
    assert all(bodies[:-1]), "nothing is written that is nothing"
    held = bodies.index(next(body for body in bodies if b"data: " in body)) + 1
    assert bodies[held:].count(KEEPALIVE) >= 9
