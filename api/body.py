"""The JSON body of a request."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from api.errors import MAX_ECHO_CHARS, CallerError
from api.frontend import frontend_of
from api.idempotency import settle_names
from api.ignored_members import IgnoredMembers, tell_ignored
from api.openai.parse import parse_json, parse_request
from api.text_pool import request_bytes

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
    frontend = frontend_of(request)
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
        async with asyncio.timeout(frontend.settings.body_timeout_s):
            raw = await request.body()
    except TimeoutError:
        raise CallerError(
            "The request body did not arrive in time.",
            status=408,
            code="body_timeout",
            should_retry=False,
        ) from None

    await settle_names(request, raw)
    request_bytes.set(len(raw))

    ignored = IgnoredMembers(refuse=frontend.settings.refuse_unused_members)

    def parse() -> RequestT:
        return parse_request(parse_json(raw), kind, schema, ignored)

    try:
        return parse() if len(raw) <= INLINE_BYTES else await frontend.pool.run(parse)
    finally:
        tell_ignored(request.scope, ignored)


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
