"""Server-sent events with a name: the payload's `type`. For the dialects whose clients read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from api.http.sse import BEHIND_KEEPALIVE, KEEPALIVE, Framing, event, event_pieces


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


TYPED = Framing(typed_event, typed_event_pieces, b"", KEEPALIVE, BEHIND_KEEPALIVE)
