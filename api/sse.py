"""Server-sent events as bytes.

What real clients need: one `data:` line and one blank line per event; a comment ends in ONE newline
(after an `id:` field a blank line of its own would make the Python SDK parse an empty event); `id:`
only where a client can resume; nothing after `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": ka\n"

_encoder = msgspec.json.Encoder()

# Legal inside JSON strings, but line ends to clients that split with str.splitlines().
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def json_bytes(payload: Any) -> bytes:
    """Compact JSON on one line, whatever a client takes for a line end."""
    encoded = _encoder.encode(payload)
    for raw, escaped in _LINE_ENDS:
        if raw in encoded:
            encoded = encoded.replace(raw, escaped)
    return encoded


def event(payload: Any, event_id: str | None = None) -> bytes:
    """One event; `event_id` becomes the client's Last-Event-ID."""
    data = b"data: " + json_bytes(payload) + b"\n\n"
    return data if event_id is None else b"id: " + event_id.encode("ascii") + b"\n" + data


def typed_event(payload: Any) -> bytes:
    """One event with a name of its own: the payload's `type`."""
    kind: str = payload["type"]
    return b"event: " + kind.encode("ascii") + b"\n" + event(payload)


@dataclass(frozen=True, slots=True)
class Framing:
    """How a dialect's payloads become a stream."""

    event: Callable[[Any], bytes]
    done: bytes  # after the last event
    keepalive: bytes


PLAIN = Framing(event, DONE, KEEPALIVE)
TYPED = Framing(typed_event, b"", KEEPALIVE)
