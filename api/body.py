"""The JSON body of a request, whatever its content type says."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from api.errors import MAX_ECHO_CHARS, CallerError
from api.frontend import frontend_of
from api.idempotency import settle_names
from api.openai.parse import parse_json, parse_request

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

PLAIN_CODING = "identity"
INLINE_BYTES = 16_384  # larger bodies are parsed by a thread


async def read_request(request: Request, kind: str, schema: type[RequestT]) -> RequestT:
    """The body as a request of the given schema.

    A request with an idempotency key has its name from then on: ask for its caller afterwards.
    Raises CallerError (400 for what is no JSON object, 408 for a body that never comes, 415 for one
    that is compressed) and InvalidParameter.
    """
    frontend = frontend_of(request)
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

    def parse() -> RequestT:
        return parse_request(parse_json(raw), kind, schema)

    return parse() if len(raw) <= INLINE_BYTES else await frontend.pool.run(parse)
