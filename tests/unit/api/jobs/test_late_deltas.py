"""EventStreamBody: what is late goes in one write, an event for each step; nothing waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from api.dialects.chat.formatter import ChatFormatter
from api.dialects.completions.formatter import CompletionFormatter
from api.dialects.generate.formatter import GenerateFormatter
from api.dialects.messages.formatter import MessageContext, MessageFormatter
from api.generation.formatter import Formatter, ResponseContext, Timing
from api.http.time_slices import PIECE_BYTES, TimeSlices
from api.jobs.event_stream import StreamInterrupted
from api.jobs.sent_events import SentEvents
from api.jobs.stream_response import EventStreamBody
from shared.messages import START, Cursor, Delta, Finished, FinishReason, Segment, Usage
from shared.transport.ports.jobs import TransportError
from tests.unit.api.dialects.letter_tokenizer import LetterTokenizer

KEEPALIVE_S = 7.0
CONTEXT = ResponseContext(id="r-1", model="m", created_s=1)
TOKENIZER = LetterTokenizer([b"<end>", b"a"])
Event = Delta | Finished | Exception
FORMATTERS: dict[str, Callable[[], Formatter[Any]]] = {
    "generate": lambda: GenerateFormatter("r-1", "m", Timing()),
    "chat": lambda: ChatFormatter(CONTEXT, TOKENIZER),
    "completion": lambda: CompletionFormatter(CONTEXT, TOKENIZER),
}


class Waiting:
    """A stream whose bursts come one by one: the rest of a burst waits while its first is read."""

    def __init__(self, *bursts: Sequence[Event]) -> None:
        self._bursts = [list(burst) for burst in bursts]
        self.timeouts: list[tuple[int, float]] = []  # what waited at each `get`, and its timeout

    @property
    def num_waiting(self) -> int:
        return len(self._bursts[0]) if self._bursts else 0

    async def get(self, timeout_s: float) -> Delta | Finished | None:
        self.timeouts.append((self.num_waiting, timeout_s))
        while not self._bursts[0]:
            assert timeout_s, "it waits for a burst without time"
            self._bursts.pop(0)
        event = self._bursts[0].pop(0)
        if isinstance(event, Exception):
            raise event
        return event


class Source:
    has_long_events = False
    job_id = "0-1"

    def __init__(self) -> None:
        self.num_tokens = 0

    def observe(self, delta: Delta) -> None:
        self.num_tokens += len(delta.token_ids)

    def observe_end(self, end: Finished) -> None: ...

    def is_small(self, end: Finished) -> bool:
        return True


def deltas(*texts: str) -> list[Delta]:
    """Deltas that follow each other, with a token for each character."""
    found, at = [], START
    for text in texts:
        end = Cursor(at.num_tokens + len(text), at.num_bytes + len(text.encode()))
        segments = tuple(Segment(0, 1, len(character.encode())) for character in text)
        ids = tuple(map(ord, text))
        found.append(Delta(at, end, ids, text, None, segments if len(text) > 1 else None))
        at = end
    return found


def end_of(last: Delta) -> Finished:
    return Finished(last.end, FinishReason.LENGTH, Usage(3, last.end.num_tokens))


class Served:
    """A body's writes of events, the head and keep-alives left out."""

    def __init__(self, formatter: Formatter[Any]) -> None:
        self.writes: list[bytes] = []
        self.events = SentEvents(formatter)
        self.beginning = self.events.beginning if formatter.has_beginning else None
        self.source = Source()

    async def run(self, stream: Waiting) -> Served:
        store = SimpleNamespace(get=self._away)
        jobs: Any = SimpleNamespace(slices=TimeSlices(), keepalive_s=KEEPALIVE_S, store=store)
        parts: tuple[Any, Any] = stream, self.source
        await EventStreamBody(jobs, self.events, self.beginning).run(*parts, self._send)
        return self

    async def _away(self, job_id: str) -> None:
        raise TransportError("no connection")

    async def _send(self, message: Any) -> None:
        if b"data: " in (body := message.get("body", b"")):
            self.writes.append(body)


async def served_message(stream: Waiting) -> Served:
    context = MessageContext(id="r-1", model="m", prompt_tokens=3)
    return await Served(MessageFormatter(context)).run(stream)


async def served(stream: Waiting, dialect: str = "generate") -> Served:
    return await Served(FORMATTERS[dialect]()).run(stream)


def payloads(write: bytes) -> list[Any]:
    lines = [line for line in write.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def texts(write: bytes) -> list[str]:
    return [payload["text"] for payload in payloads(write)]


async def test_what_came_while_one_was_sent_is_one_write_with_an_event_for_each_step() -> None:
    a, b, c, d = deltas("a", "b", "cé", "d")
    found = await served(Waiting([a], [b, c, d], [end_of(d)]))
    assert [texts(write) for write in found.writes] == [["a"], ["b", "c", "é", "d"], [""]]
    assert found.source.num_tokens == 5
    assert payloads(found.writes[-1])[0]["full_text"] == "abcéd"
    assert found.writes[-1].endswith(b"data: [DONE]\n\n")


async def test_where_nothing_is_late_each_delta_is_its_own_write() -> None:
    a, b, c = deltas("a", "b", "c")
    found = await served(Waiting([a], [b], [c], [end_of(c)]))
    assert [texts(write) for write in found.writes] == [["a"], ["b"], ["c"], [""]]


async def test_only_what_is_here_is_taken_and_without_time() -> None:
    a, b, c = deltas("a", "b", "c")
    stream = Waiting([a, b], [c, end_of(c)])
    await served(stream)
    assert stream.timeouts == [(2, KEEPALIVE_S), (1, 0.0), (0, KEEPALIVE_S), (1, 0.0)]


async def test_a_late_end_follows_the_deltas_once() -> None:
    a, b = deltas("a", "b")
    found = await served(Waiting([a, b, end_of(b)]))
    assert [text for write in found.writes for text in texts(write)] == ["a", "b", ""]
    assert b"".join(found.writes).count(b"[DONE]") == 1


async def test_what_came_before_a_failure_is_sent_before_it_is_told() -> None:
    a, b = deltas("a", "b")
    found = Served(FORMATTERS["generate"]())
    with pytest.raises(StreamInterrupted):
        await found.run(Waiting([a, b, StreamInterrupted("0-a", b.end)]))
    assert texts(b"".join(found.writes)) == ["a", "b"]
    assert str(found.events.resume_point) == str(b.end)


async def test_a_write_of_late_deltas_is_bounded() -> None:
    many = deltas(*["é" * 100] * 400)
    found = await served(Waiting([*many, end_of(many[-1])]))
    assert "".join(text for write in found.writes for text in texts(write)) == "é" * 40_000
    assert 3 < len(found.writes) < 40
    assert max(map(len, found.writes[:-1])) < 2 * PIECE_BYTES


@pytest.mark.parametrize("dialect", FORMATTERS)
async def test_the_events_of_plain_text_are_those_that_the_formatter_makes(dialect: str) -> None:
    pieces = deltas("a", "b", '"\\\u2028', "é€", "\n")
    bursts = [[event] for event in (*pieces, end_of(pieces[-1]))]
    found = await served(Waiting(*bursts), dialect)
    slow = FORMATTERS[dialect]()
    assert slow.plain_event() is not None
    slow.plain_event = lambda: None  # type: ignore[method-assign]
    assert found.writes == (await Served(slow).run(Waiting(*bursts))).writes


async def test_a_message_begins_without_the_store_and_ends_with_the_right_counts() -> None:
    (a,) = deltas("a")
    end = Finished(a.end, FinishReason.LENGTH, Usage(3, 1, 2))
    found = await served_message(Waiting([a], [end]))
    start, *_, stop, _ = [payload for write in found.writes for payload in payloads(write)]
    assert start["message"]["usage"]["input_tokens"] == 3
    assert (stop["usage"]["input_tokens"], stop["usage"]["cache_read_input_tokens"]) == (1, 2)


async def test_a_message_without_tokens_begins_with_the_counts_of_its_end() -> None:
    end = Finished(START, FinishReason.STOP, Usage(3, 0, 2))
    found = await served_message(Waiting([end]))
    start, *_ = [payload for write in found.writes for payload in payloads(write)]
    assert start["message"]["usage"]["cache_read_input_tokens"] == 2


@pytest.mark.parametrize("is_late", [False, True])
async def test_tokens_without_text_keep_their_place_in_the_next_event(is_late: bool) -> None:
    first = Delta(START, Cursor(1, 1), (11,), "a")
    silent = Delta(first.end, Cursor(2, 1), (12,), "")
    last = Delta(silent.end, Cursor(4, 3), (13, 14), "bc", None, (Segment(0, 1, 1),) * 2)
    bursts = [[first, silent, last]] if is_late else [[first], [silent], [last]]
    found = await served(Waiting(*bursts, [end_of(last)]))
    sent = [payload["token_ids"] for write in found.writes for payload in payloads(write)]
    assert [token_id for token_ids in sent for token_id in token_ids] == [11, 12, 13, 14]
    assert str(found.events.resume_point) == str(last.end)
