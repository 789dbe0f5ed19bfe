"""The events of a response to one request, as the frames of a WebSocket have them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import msgspec
from starlette.types import Message

from api.generation.ignored_parameters import HEADER as IGNORED_HEADER

Payload = dict[str, Any]


class Event(NamedTuple):
    """An event as JSON text, which is sent on as it is."""

    kind: str
    raw: bytes

    def payload(self) -> Payload:
        """Returns it decoded."""
        payload: Payload = msgspec.json.decode(self.raw)
        return payload


async def parsed_events(chunks: asyncio.Queue[Message | None]) -> AsyncGenerator[Event, None]:
    """Yields the events of a response as it arrives; the body of one that is no stream as one."""
    status, ignored, is_stream, rest = 0, None, False, b""
    while (message := await chunks.get()) is not None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            status, ignored = message["status"], headers.get(IGNORED_HEADER.encode())
            is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            continue
        rest += message.get("body", b"")
        if is_stream:
            *whole, rest = rest.split(b"\n\n")
            for event in map(_event_of, whole):
                if event is not None:
                    yield _with_headers(event, ignored)
    if not is_stream and rest:
        body = msgspec.json.decode(rest)
        if status < 400:
            yield Event("body", rest)
        else:
            body = {"type": "error", "status": status, **body}
            yield Event("error", msgspec.json.encode(body))


def _event_of(text: bytes) -> Event | None:
    """Returns a server-sent event of JSON; None for a comment."""
    fields = dict(line.split(b": ", 1) for line in text.split(b"\n") if b": " in line)
    raw = fields.get(b"data")
    if raw is None:
        return None
    event = Event(fields.get(b"event", b"").decode(), raw)
    if event.kind != "error":
        return event
    payload = event.payload()  # here an error is an object, as in an error response
    members = {name: payload.get(name) for name in ("code", "message", "param")}
    error = {**payload, "error": {"type": "server_error", **members}}
    return Event(event.kind, msgspec.json.encode(error))


def _with_headers(event: Event, ignored: bytes | None) -> Event:
    if ignored is None or event.kind != "response.created":
        return event
    headers = {IGNORED_HEADER: ignored.decode("latin-1")}
    return Event(event.kind, msgspec.json.encode({**event.payload(), "headers": headers}))
