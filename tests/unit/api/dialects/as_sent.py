"""Payloads as a client reads them, whatever a dialect holds them as."""

from __future__ import annotations

from typing import Any

import msgspec

from api.http.sse import json_bytes


def as_sent(payload: Any) -> Any:
    """Encodes and decodes `payload`. Iterators in it are read by that."""
    return msgspec.json.decode(json_bytes(payload))
