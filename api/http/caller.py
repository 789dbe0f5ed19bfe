"""Caller: the identity, the permissions and the ids of one request, and the response headers of it.

RequestIdMiddleware makes it, and names every response in the header `x-request-id`. A request that
makes a job is named by that job: the header has the `id` of the response. The client's own id
(`X-Client-Request-Id`) is kept with the job and never used as a key.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.traces import span_in
from api.ids import parse_job_id, public_id
from api.metrics import Metrics
from shared.keys import new_job_id
from shared.messages import Idempotency
from shared.tracing import INVALID_SPAN_CONTEXT, SpanContext

log = logging.getLogger(__name__)

DEFAULT_TENANT = "default"
HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
NOSNIFF = ("x-content-type-options", "nosniff")  # JSON of a client's text is no page
MAX_CLIENT_ID_CHARS = 512
MAX_PUBLIC_ID_CHARS = 100

# Of what a POST makes a job of.
KINDS_BY_PATH = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/generate": "generate",
    "/v1/messages": "message",
    "/v1/responses": "response",
    "/v1/responses/compact": "response",
}
ANTHROPIC_VERSION_HEADER = "anthropic-version"
_ANTHROPIC_ROUTES = "/v1/messages"
_SHARED_ROUTES = "/v1/models"  # Anthropic's for clients that send its version
# Polled by probes, scrapers, pages and clients that wait for an end, or fetched with every page:
# their access log lines would bury all others.
_ROUTINE = frozenset(
    {
        "/",
        "/dashboard",
        "/docs",
        "/health",
        "/metrics",
        "/metrics/deployment",
        "/openapi.json",
        "/ready",
        "/redoc",
        "/static/{file_name}",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/dead-letters",
        "/v1/deployment/stream",
        "/v1/files",
        "/v1/jobs",
        "/v1/jobs/{name}",
        "/v1/jobs/{name}/events",
        "/v1/models",
        "/v1/models/{model_id:path}",
        "/v1/responses/{name}",
        "/version",
    }
)
_HEADERS = "response_headers"  # in the scope's state
_REFUSED = "refused"  # likewise
_NAMED = ("/v1/jobs/", "/v1/responses/")  # a job's public id follows


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, and what it is called. A row of a batch has one too.

    RequestIdMiddleware makes it with the ids, AccessMiddleware adds the identity, and
    `api.jobs.new_job` the job of an idempotency key.

    `request_id` names the request in headers and logs; for a request that makes a job it is the
    public id of `job_id`. `scope`: the tenant whose jobs the caller may see; None: all, for
    operators and for a server without keys. `is_known`: it has a key, or none is needed.
    `is_operator`: it may see what the deployment does for all tenants, which any key may where
    there is one tenant. `key_id`: of the key that lets it in (`ApiKey.key_id`). `trace`: what the
    spans of its jobs are inside of.
    """

    request_id: str
    job_id: str | None = None
    client_request_id: str | None = None
    tenant: str = DEFAULT_TENANT
    scope: str | None = None
    is_known: bool = True
    is_operator: bool = True
    key_id: str = ""
    idempotency: Idempotency | None = None
    trace: SpanContext = INVALID_SPAN_CONTEXT

    def sees(self, tenant: str) -> bool:
        """Returns whether jobs of `tenant` are visible to the caller."""
        return self.scope in (None, tenant)

    def with_job(self, job_id: str, idempotency: Idempotency) -> Caller:
        """Returns the caller of a request that stands for the job of its idempotency key."""
        assert self.job_id is not None, "the route makes no jobs"
        request_id = self.request_id.removesuffix(self.job_id) + job_id
        return replace(self, request_id=request_id, job_id=job_id, idempotency=idempotency)


def set_caller(scope: Scope, caller: Caller) -> None:
    """Makes `caller` the caller of the request that `scope` belongs to."""
    scope.setdefault("state", {})["caller"] = caller


def caller_in(scope: Scope) -> Caller:
    """Returns the caller of the request that `scope` belongs to."""
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def speaks_anthropic(scope: Scope) -> bool:
    """Returns whether responses to this request have Anthropic's shapes."""
    path: str = scope["path"]
    if path == _ANTHROPIC_ROUTES or path.startswith(_ANTHROPIC_ROUTES + "/"):
        return True
    is_shared = path == _SHARED_ROUTES or path.startswith(_SHARED_ROUTES + "/")
    return is_shared and ANTHROPIC_VERSION_HEADER in Headers(scope=scope)


async def get_caller(request: Request) -> Caller:
    """Returns the caller, as of now: the job of an idempotency key is known after the body."""
    return caller_in(request.scope)


CallerDep = Annotated[Caller, Depends(get_caller)]


class RequestIdMiddleware:
    """Pure ASGI. Makes the request's Caller, and sends the headers that `set_headers` was given.

    Counts the response and logs one line of it.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        set_caller(scope, replace(_new_caller(scope), trace=span_in(scope).get_span_context()))
        status = 0
        begin_s = time.monotonic()

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = caller_in(scope).request_id
                headers[NOSNIFF[0]] = NOSNIFF[1]
                if speaks_anthropic(scope):
                    headers[ANTHROPIC_HEADER] = headers[HEADER]
                headers.update(scope["state"].get(_HEADERS, {}))
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        finally:
            self._report(scope, status, time.monotonic() - begin_s)

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        # The route's template, not the path: label values must stay few.
        route = getattr(scope.get("route"), "path", "other")
        known = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
        method = scope["method"] if scope["method"] in known else "other"
        # 503: the store or a worker is missing, of which a line of its own tells.
        is_answer = 0 < status < 500 or status == 503
        is_routine = route in _ROUTINE and method in ("GET", "HEAD") and is_answer
        # 499: the client had left before there was a response.
        self._metrics.http_responses.labels(route, method, str(status or 499)).inc()
        if _REFUSED in scope["state"]:
            self._metrics.accounts.refuse()
        log.log(
            logging.DEBUG if is_routine else logging.INFO,
            "request answered",
            extra={
                "request_id": caller_in(scope).request_id,
                "route": route,
                "method": method,
                "status": status or 499,
                "duration_ms": round(seconds * 1000, 1),
            },
        )


def set_headers(scope: Scope, headers: Mapping[str, str]) -> None:
    """Adds headers to the response of this request, whatever sends it: a route or an error."""
    scope.setdefault("state", {}).setdefault(_HEADERS, {}).update(headers)


def note_refused(scope: Scope) -> None:
    """Notes that this request is refused because of a limit: it is counted for its tenant."""
    scope.setdefault("state", {})[_REFUSED] = True


def _new_caller(scope: Scope) -> Caller:
    headers = Headers(scope=scope)
    client_request_id = _printable(headers.get("x-client-request-id", ""))
    path: str = scope["path"]
    kind = KINDS_BY_PATH.get(path)
    if kind is not None and scope["method"] == "POST":
        job_id = new_job_id()
        return Caller(public_id(kind, job_id), job_id, client_request_id)
    folder = next((folder for folder in _NAMED if path.startswith(folder)), None)
    if folder is not None:
        name = path.removeprefix(folder).split("/")[0]
        if len(name) <= MAX_PUBLIC_ID_CHARS and parse_job_id(name) is not None:
            return Caller(name, None, client_request_id)
    return Caller(f"req-{uuid.uuid4().hex}", None, client_request_id)


def _printable(text: str) -> str | None:
    """Returns the visible ASCII of a client's id, capped: logs and the job's record have it."""
    kept = "".join(char for char in text if " " <= char <= "~").strip()
    return kept[:MAX_CLIENT_ID_CHARS] or None
