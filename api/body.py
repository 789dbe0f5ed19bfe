"""The JSON body of a request, whatever its content type says."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from api.errors import CallerError
from api.frontend import frontend_of
from api.openai.parse import parse_json, parse_request

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

INLINE_BYTES = 16_384  # larger bodies are parsed by a thread


async def read_request(request: Request, kind: str, schema: type[RequestT]) -> RequestT:
    """The body as a request of the given schema.

    Raises CallerError (400 for what is no JSON object, 408 for a body that never comes) and
    InvalidParameter.
    """
    frontend = frontend_of(request)
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

    def parse() -> RequestT:
        return parse_request(parse_json(raw), kind, schema)

    return parse() if len(raw) <= INLINE_BYTES else await frontend.pool.run(parse)
