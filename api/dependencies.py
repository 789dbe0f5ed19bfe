"""What routes take from a request: its caller, its body, its page of a list."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.auth.caller import Caller, caller_in, set_caller
from api.errors import MAX_ECHO_CHARS, CallerError, unsupported
from api.generation.ignored_parameters import IgnoredMembers, set_ignored_header
from api.generation.thread_pool import request_bytes
from api.generation.validation import parse_json, parse_request
from api.http.json_response import json_answer
from api.jobs.idempotency import HEADER as IDEMPOTENCY_HEADER
from api.jobs.idempotency import resolve_job_id
from api.services import services_of
from shared.messages import InvalidParameter


def caller_of(request: Request) -> Caller:
    """Returns the request's caller. Its job is known once the body has been read."""
    return caller_in(request.scope)


# The JSON body of a request.

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

PLAIN_CODING = "identity"
JSON = "application/json"
INLINE_BYTES = 16_384  # larger bodies are parsed by a thread


async def read_request(request: Request, kind: str, schema: type[RequestT]) -> RequestT:
    """Returns the request in the body, parsed by `schema`. The names of its ignored members become
    a header of the answer.

    A request with an idempotency key has its name from then on: ask for its caller afterwards.
    Raises CallerError (400 for what is no JSON object, 408 for a body that never comes, 415 for one
    that is compressed or has another media type) and InvalidParameter.
    """
    services = services_of(request)
    _require_json(request)
    coding = request.headers.get("content-encoding", PLAIN_CODING).strip().lower()
    if coding != PLAIN_CODING:
        raise CallerError(
            f"Bodies are read as they are: Content-Encoding '{coding[:MAX_ECHO_CHARS]}' is not "
            "supported.",
            status=415,
            code="unsupported_content_encoding",
            param="Content-Encoding",
        )
    try:
        async with asyncio.timeout(services.settings.body_timeout_s):
            raw = await request.body()
    except TimeoutError:
        raise CallerError(
            "The request body did not arrive in time.",
            status=408,
            code="body_timeout",
            should_retry=False,
        ) from None

    caller, key = caller_of(request), request.headers.get(IDEMPOTENCY_HEADER)
    if key is not None and caller.job_id is not None:
        named = await resolve_job_id(caller, services.store, key, request.url.path, raw)
        set_caller(request.scope, named)
    request_bytes.set(len(raw))

    ignored = IgnoredMembers(refuse=services.settings.refuse_unused_members)

    def parse() -> RequestT:
        return parse_request(parse_json(raw), kind, schema, ignored)

    try:
        return parse() if len(raw) <= INLINE_BYTES else await services.pool.run(parse)
    finally:
        set_ignored_header(request.scope, ignored)


def _require_json(request: Request) -> None:
    """A page may send text/plain, forms and bodies without a type to any server, with no
    preflight. A body declared as JSON goes out only after one."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == JSON or (media_type.startswith("application/") and media_type[-5:] == "+json"):
        return
    was = f"not '{media_type[:MAX_ECHO_CHARS]}'" if media_type else "this request has none"
    raise CallerError(
        f"The body must have the Content-Type 'application/json'; {was}.",
        status=415,
        code="unsupported_media_type",
        param="Content-Type",
        should_retry=False,
    )


# Pages of a list, as OpenAI's: `after` and `limit` in, `has_more` out.

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
            raise unsupported(name[:MAX_ECHO_CHARS], "it is not known here")
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= limit <= most:
        raise InvalidParameter("limit", f"must be between 1 and {most}")
    after = query.get("after")
    if after is not None and not 0 < len(after) <= MAX_ID_CHARS:
        raise InvalidParameter("after", f"must have 1 to {MAX_ID_CHARS} characters")
    return Page(after, limit)


def page_answer(payloads: Sequence[dict[str, Any]], page: Page) -> Response:
    """`payloads`: one more than `page.limit` where there are more."""
    shown = payloads[: page.limit]
    return json_answer(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(payloads) > page.limit,
        }
    )
