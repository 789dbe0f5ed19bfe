"""What routes take from a request: its caller, its body, its page of a list."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request
from starlette.types import Scope

from api.auth.stream_tokens import StreamTokens
from api.dialects.responses.store import ResponseStore
from api.errors import MAX_ECHO_CHARS, CallerError
from api.generation.ignored_parameters import HEADER as IGNORED_HEADER
from api.generation.ignored_parameters import IgnoredMembers
from api.generation.service import GenerationService
from api.generation.thread_pool import request_bytes
from api.generation.validation import RequestT, parse_json, parse_request
from api.http.caller import Caller, caller_in, set_caller
from api.http.request_id import set_headers
from api.jobs.idempotency import HEADER as IDEMPOTENCY_HEADER
from api.jobs.idempotency import resolve_job_id
from api.jobs.service import JobService
from api.services import Services
from api.system.health_monitor import HealthMonitor
from shared.transport.ports.dead_letters import DeadLetters


def services_in(scope: Scope) -> Services:
    """Returns the parts of the running application. No other module reads `app.state`."""
    services = scope["app"].state.services
    assert isinstance(services, Services)
    return services


def services_of(request: Request) -> Services:
    return services_in(request.scope)


def caller_of(request: Request) -> Caller:
    """Returns the request's caller. Its job is known once the body has been read."""
    return caller_in(request.scope)


# FastAPI would run functions that are not coroutines in threads.


async def get_services(request: Request) -> Services:
    return services_of(request)


async def get_caller(request: Request) -> Caller:
    return caller_in(request.scope)


async def get_jobs(request: Request) -> JobService:
    return services_of(request).jobs


async def get_generation(request: Request) -> GenerationService:
    return services_of(request).generation


async def get_responses(request: Request) -> ResponseStore:
    return services_of(request).responses


async def get_dead_letters(request: Request) -> DeadLetters:
    return services_of(request).dead_letters


async def get_stream_tokens(request: Request) -> StreamTokens:
    return services_of(request).stream_tokens


async def get_health(request: Request) -> HealthMonitor:
    return services_of(request).health


ServicesDep = Annotated[Services, Depends(get_services)]
CallerDep = Annotated[Caller, Depends(get_caller)]
JobsDep = Annotated[JobService, Depends(get_jobs)]
GenerationDep = Annotated[GenerationService, Depends(get_generation)]
ResponsesDep = Annotated[ResponseStore, Depends(get_responses)]
DeadLettersDep = Annotated[DeadLetters, Depends(get_dead_letters)]
StreamTokensDep = Annotated[StreamTokens, Depends(get_stream_tokens)]
HealthDep = Annotated[HealthMonitor, Depends(get_health)]


# The JSON body of a request.


PLAIN_CODING = "identity"
JSON = "application/json"
INLINE_BYTES = 16_384  # larger bodies are parsed by a thread


async def read_request(request: Request, schema: type[RequestT]) -> RequestT:
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
        return parse_request(parse_json(raw), schema, ignored)

    try:
        return parse() if len(raw) <= INLINE_BYTES else await services.pool.run(parse)
    finally:
        if ignored.text is not None:
            set_headers(request.scope, {IGNORED_HEADER: ignored.text})


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
