"""Server-sent events as bytes.

Real clients need: one `data:` line and one blank line per event; a comment ends in a blank
line too, since many clients split at blank lines and would lose the event after it, but in ONE
newline once an `id:` was sent (OpenAI's Python SDK would parse an empty event); `id:` only where a
client can resume; nothing after `[DONE]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.types import Send

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": ka\n\n"
KEEPALIVE_AFTER_ID = b": ka\n"  # where an event of the stream had an `id:` already
BEHIND_KEEPALIVE = b":\n\n"  # opens the next write: see Framing


class JoinedText:
    """A string that is joined when it is encoded: many payloads may share a long part."""

    __slots__ = ("parts",)  # no dataclass: msgspec would encode it as an object

    def __init__(self, *parts: str) -> None:
        self.parts = parts


def _plain(value: Any) -> Any:
    """Encodes a model by its fields, an iterator as a list, and a JoinedText as a string."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, JoinedText):
        return "".join(value.parts)
    if isinstance(value, Iterator):
        return list(value)
    raise NotImplementedError(f"no JSON for {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain)

_FEW = 64  # items of a long list that are encoded in one go
_SEVERAL = 128  # mappings of a list, each of which may be long: a response has no more choices

# Legal inside JSON strings, but line ends to clients that split with str.splitlines().
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def json_bytes(payload: Any) -> bytes:
    """Returns compact JSON on one line, whatever a client takes for a line end.

    Models become objects, iterators lists.
    """
    encoded = _encoder.encode(payload)
    for raw, escaped in _LINE_ENDS:
        if raw in encoded:
            encoded = encoded.replace(raw, escaped)
    return encoded


def json_pieces(payload: Any) -> Iterator[bytes]:
    """Yields what `json_bytes` returns, in pieces that take about a millisecond each at most.

    Models, mappings and short lists of mappings are descended into, other lists are cut, an
    iterator is a list whose items are made as they are taken. Everything else is encoded in one go.
    """
    if isinstance(payload, dict):
        return _mapping_pieces(payload)
    if isinstance(payload, BaseModel):
        return _mapping_pieces(dict(payload))
    if isinstance(payload, Iterator):
        return _list_pieces(payload)
    if isinstance(payload, JoinedText):
        return _text_pieces(payload)
    if isinstance(payload, list | tuple) and payload:
        if len(payload) <= _SEVERAL and isinstance(payload[0], dict):
            return _nested_pieces(payload)
        return _list_pieces(iter(payload))
    return iter((json_bytes(payload),))


def _mapping_pieces(payload: dict[str, Any]) -> Iterator[bytes]:
    before = b"{"
    for name, value in payload.items():
        yield before + json_bytes(name) + b":"
        yield from json_pieces(value)
        before = b","
    yield b"}" if payload else b"{}"


def _nested_pieces(items: Sequence[Any]) -> Iterator[bytes]:
    before = b"["
    for item in items:
        yield before
        yield from json_pieces(item)
        before = b","
    yield b"]"


def _text_pieces(text: JoinedText) -> Iterator[bytes]:
    yield b'"'
    for part in text.parts:
        yield json_bytes(part)[1:-1]
    yield b'"'


def _list_pieces(items: Iterator[Any]) -> Iterator[bytes]:
    before = b"["
    while few := list(islice(items, _FEW)):
        yield before
        yield json_bytes(few)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


def event(payload: Any, event_id: str | None = None) -> bytes:
    """Returns one event; `event_id` becomes the client's Last-Event-ID."""
    data = b"data: " + json_bytes(payload) + b"\n\n"
    return data if event_id is None else b"id: " + event_id.encode("ascii") + b"\n" + data


def event_pieces(payload: Any) -> Iterator[bytes]:
    """Yields what `event` returns, as `json_pieces`."""
    yield b"data: "
    yield from json_pieces(payload)
    yield b"\n\n"


def typed_event(payload: Any) -> bytes:
    """Returns one event with a name: the payload's `type`."""
    return _name_line(payload) + event(payload)


def typed_event_pieces(payload: Any) -> Iterator[bytes]:
    """Yields what `typed_event` returns, as `json_pieces`."""
    yield _name_line(payload)
    yield from event_pieces(payload)


def _name_line(payload: Any) -> bytes:
    kind: str = payload["type"]
    return b"event: " + kind.encode("ascii") + b"\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """How a dialect's payloads become a stream.

    A keep-alive is a write of its own. Clients that strip what they read (vLLM's benchmark client)
    lose its blank line, and would lose the event that comes next with it: that event's write begins
    with `behind_keepalive`.
    """

    event: Callable[[Any], bytes]
    event_pieces: Callable[[Any], Iterator[bytes]]  # the same, of a long payload
    done: bytes  # after the last event
    keepalive: bytes
    behind_keepalive: bytes = b""


PLAIN = Framing(event, event_pieces, DONE, KEEPALIVE, BEHIND_KEEPALIVE)
TYPED = Framing(typed_event, typed_event_pieces, b"", KEEPALIVE, BEHIND_KEEPALIVE)


def whole_events(framing: Framing, payload: Any) -> Iterator[bytes]:
    """Yields nothing while a long payload is encoded, as `json_pieces`, then its event as one: what
    is written can be followed by another event at any time."""
    parts = []
    for part in framing.event_pieces(payload):
        parts.append(part)
        yield b""
    yield b"".join(parts)


# EventWriter: events and keep-alives of one stream as messages of its ASGI response.


class EventWriter:
    """Every write is whole events. One that is cut while it waits has written nothing.

    A keep-alive is a separate write. Bytes that have to follow it (see `Framing`) start the next
    write. Before the first event it is a comment: clients of a dialect whose keep-alive is an event
    may refuse one that comes before the dialect's first.
    """

    def __init__(self, keepalive: bytes, behind_keepalive: bytes) -> None:
        self.has_begun = False
        self._keepalive = keepalive
        self._behind_keepalive = behind_keepalive
        self._has_event = False  # one was written
        self._lead = b""  # of the next events that are written
        self._written_s = time.monotonic()

    @property
    def silence_s(self) -> float:
        """Seconds since the last write, or since this was made."""
        return time.monotonic() - self._written_s

    async def begin(self, send: Send) -> None:
        """Sends status and headers."""
        self.has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def keep_alive(self, send: Send) -> None:
        """Writes a keep-alive."""
        self._written_s = time.monotonic()
        keepalive = self._keepalive if self._has_event else KEEPALIVE
        await send({"type": "http.response.body", "body": keepalive, "more_body": True})
        self._lead = self._behind_keepalive

    async def write(self, send: Send, events: bytes, *, more: bool = True) -> None:
        """Writes whole events, or none; with `more=False` the last ones."""
        if events:
            self._written_s = time.monotonic()
            events = self._lead + events
            self._has_event = True
        await send({"type": "http.response.body", "body": events, "more_body": more})
        if events:
            self._lead = b""

    def follow_id(self) -> None:
        """Records that an event with an `id:` was written: a blank line after a comment would
        be an empty event to some clients from now on."""
        self._keepalive, self._behind_keepalive = KEEPALIVE_AFTER_ID, b""
