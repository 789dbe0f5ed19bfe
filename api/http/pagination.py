"""Pages of a list, as OpenAI's: `after` and `limit` in, `has_more` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.errors import unknown_parameter
from api.http.json_response import json_response
from shared.messages import InvalidParameter

MAX_ID_CHARS = 200


@dataclass(frozen=True, slots=True)
class Page:
    """At most `limit` of what follows the object with the id `after`."""

    after: str | None
    limit: int


def page_of(request: Request, default: int, most: int, also: Sequence[str] = ()) -> Page:
    """`also`: query parameters that the route knows beside these. Raises InvalidParameter."""
    query = request.query_params
    for name in query:
        if name not in ("after", "limit", *also):
            raise unknown_parameter(name)
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= limit <= most:
        raise InvalidParameter("limit", f"must be between 1 and {most}")
    after = query.get("after")
    if after is not None and not 0 < len(after) <= MAX_ID_CHARS:
        raise InvalidParameter("after", f"must have 1 to {MAX_ID_CHARS} characters")
    return Page(after, limit)


def page_response(payloads: Sequence[dict[str, Any]], page: Page) -> Response:
    """`payloads`: one more than `page.limit` where there are more."""
    shown = payloads[: page.limit]
    return json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(payloads) > page.limit,
        }
    )
