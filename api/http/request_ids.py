"""RequestIdMiddleware: names every request, makes its Caller and logs one line of its response."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.caller import (
    MAX_PUBLIC_ID_CHARS,
    REFUSED,
    RESPONSE_HEADERS,
    Caller,
    caller_in,
    set_caller,
    speaks_anthropic,
)
from api.http.traces import span_in
from api.ids import parse_job_id, public_id
from api.metrics import Metrics
from shared.keys import new_job_id
from shared.tracing import write_context

log = logging.getLogger(__name__)

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
NOSNIFF = ("x-content-type-options", "nosniff")  # JSON of a client's text is no page
MAX_CLIENT_ID_CHARS = 512

# Routes whose POST makes a job -> the kind of the job.
KINDS_BY_PATH = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
    "/generate": "generate",
    "/v1/messages": "message",
    "/v1/responses": "response",
    "/v1/responses/compact": "response",
}
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
        "/v1/jobs/{name}/answer",
        "/v1/jobs/{name}/events",
        "/v1/jobs/{name}/prompt",
        "/v1/models",
        "/v1/models/{model_id:path}",
        "/v1/responses/{name}",
        "/version",
    }
)
_NAMED = ("/v1/jobs/", "/v1/responses/")  # a job's public id follows


class RequestIdMiddleware:
    """Pure ASGI. Makes the request's Caller, and sends the headers that `set_headers` was given.

    Counts the response and logs one line of it.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, partition_for: Callable[[Scope], int]
    ) -> None:
        """`partition_for` returns the partition of a request's job."""
        self._app = app
        self._metrics = metrics
        self._partition_for = partition_for

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        traceparent, tracestate = write_context(span_in(scope).get_span_context())
        caller = replace(self._new_caller(scope), traceparent=traceparent, tracestate=tracestate)
        set_caller(scope, caller)
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
                headers.update(scope["state"].get(RESPONSE_HEADERS, {}))
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
        # 503: Redis or a worker is missing, which is logged elsewhere.
        is_answer = 0 < status < 500 or status == 503
        is_routine = route in _ROUTINE and method in ("GET", "HEAD") and is_answer
        # 499: the client had left before there was a response.
        self._metrics.http_responses.labels(route, method, str(status or 499)).inc()
        if status >= 500 and route not in _ROUTINE:
            self._metrics.server_errors["unavailable" if status == 503 else "errors"] += 1
        if REFUSED in scope["state"]:
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

    def _new_caller(self, scope: Scope) -> Caller:
        headers = Headers(scope=scope)
        client_request_id = _printable(headers.get("x-client-request-id", ""))
        path: str = scope["path"]
        kind = KINDS_BY_PATH.get(path)
        if kind is not None and scope["method"] == "POST":
            job_id = new_job_id(self._partition_for(scope))
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
