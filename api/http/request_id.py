"""RequestIdMiddleware: the outermost of ours. Names every request, and every answer by it.

A request that makes a job is named by that job: the header says the `id` of the answer. What the
caller calls the request (`X-Client-Request-Id`) is kept with the job and never used as a key.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.generation.ignored_parameters import HEADER as IGNORED_HEADER
from api.ids import parse_job_id, public_id
from api.metrics import Metrics
from shared.keys import new_job_id
from shared.messages import Durability

log = logging.getLogger(__name__)

HEADER = "x-request-id"
DURABILITY_HEADER = "x-penstock-durability"
MAX_CLIENT_ID_CHARS = 512
MAX_PUBLIC_ID_CHARS = 100

_KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/generate": "generate",
    "/v1/messages": "message",
    "/v1/responses": "response",
}
_NAMED = ("/v1/jobs/", "/v1/responses/")  # a job's public id follows


@dataclass(frozen=True, slots=True)
class RequestNames:
    """What a request is called, here and by its caller."""

    request_id: str
    job_id: str | None  # of the job that this request may make
    client_request_id: str | None


class RequestIdMiddleware:
    """Pure ASGI. Sets `scope["state"]["names"]`, the header, the metrics and one log line."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["names"] = _names(scope)
        status = 0
        begin_s = time.monotonic()

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = scope["state"]["names"].request_id
                if "durability" in scope["state"]:
                    headers[DURABILITY_HEADER] = scope["state"]["durability"]
                if "ignored" in scope["state"]:
                    headers[IGNORED_HEADER] = scope["state"]["ignored"]
                for name, value in scope["state"].get("rate_limits", ()):
                    headers[name] = value
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        finally:
            self._report(scope, scope["state"]["names"], status, time.monotonic() - begin_s)

    def _report(self, scope: Scope, names: RequestNames, status: int, seconds: float) -> None:
        # The route's template, not the path: label values must stay few.
        route = getattr(scope.get("route"), "path", "other")
        known = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
        method = scope["method"] if scope["method"] in known else "other"
        # 499: the client had left before there was an answer.
        self._metrics.http_responses.labels(route, method, str(status or 499)).inc()
        log.log(
            logging.DEBUG if route in ("/health", "/ready", "/metrics") else logging.INFO,
            "request answered",
            extra={
                "request_id": names.request_id,
                "route": route,
                "method": method,
                "status": status or 499,
                "duration_ms": round(seconds * 1000, 1),
            },
        )


def names_of(request: Request) -> RequestNames:
    names = request.scope["state"]["names"]
    assert isinstance(names, RequestNames)
    return names


def rename(request: Request, job_id: str) -> None:
    """The request turned out to be for this job."""
    names = names_of(request)
    assert names.job_id is not None, "this route makes jobs"
    request.scope["state"]["names"] = replace(
        names, job_id=job_id, request_id=names.request_id.removesuffix(names.job_id) + job_id
    )


def tell_durability(scope: Scope, durability: Durability) -> None:
    """Sets the answer's header for what its acceptance has waited for, if it has."""
    if durability is not Durability.NONE:
        scope.setdefault("state", {})["durability"] = durability.value


def _names(scope: Scope) -> RequestNames:
    headers = Headers(scope=scope)
    client_request_id = _printable(headers.get("x-client-request-id", ""))
    path: str = scope["path"]
    kind = _KINDS.get(path)
    if kind is not None and scope["method"] == "POST":
        job_id = new_job_id()
        return RequestNames(public_id(kind, job_id), job_id, client_request_id)
    folder = next((folder for folder in _NAMED if path.startswith(folder)), None)
    if folder is not None:
        name = path.removeprefix(folder).split("/")[0]
        if len(name) <= MAX_PUBLIC_ID_CHARS and parse_job_id(name) is not None:
            return RequestNames(name, None, client_request_id)
    return RequestNames(f"req-{uuid.uuid4().hex}", None, client_request_id)


def _printable(text: str) -> str | None:
    """Visible ASCII only, capped: it goes into logs and into the job's record."""
    kept = "".join(char for char in text if " " <= char <= "~").strip()
    return kept[:MAX_CLIENT_ID_CHARS] or None
