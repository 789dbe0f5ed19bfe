"""A JSON answer."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from api.sse import json_bytes


def json_answer(payload: Any, status: int = 200) -> Response:
    """`payload` as application/json, in one line."""
    return Response(json_bytes(payload), status_code=status, media_type="application/json")
