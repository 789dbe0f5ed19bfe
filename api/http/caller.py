"""Caller: the identity, the permissions and the ids of one request, and the response headers of it.

RequestIdMiddleware makes it, and names every response in the header `x-request-id`. A request that
makes a job is named by that job: the header has the `id` of the response. The client's own id
(`X-Client-Request-Id`) is kept with the job and never used as a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from fastapi import Depends
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope

from shared.messages import Failed, Finished, Idempotency, Job

DEFAULT_TENANT = "default"
MAX_PUBLIC_ID_CHARS = 100

ANTHROPIC_VERSION_HEADER = "anthropic-version"
_ANTHROPIC_ROUTES = "/v1/messages"
_SHARED_ROUTES = "/v1/models"  # Anthropic's for clients that send its version
RESPONSE_HEADERS = "response_headers"  # in the scope's state
REFUSED = "refused"  # likewise
JOB_TRACE = "job_trace"  # likewise


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and the request's ids. A row of a batch has one, too.

    RequestIdMiddleware makes it with the ids, AccessMiddleware adds the identity, and
    `api.jobs.request_reader` the job of an idempotency key.

    `request_id` names the request in headers and logs; for a request that makes a job it is the
    public id of `job_id`. `scope`: the tenant whose jobs the caller may see; None: all, for
    operators and for a server without keys. `is_known`: it has a key, or none is needed.
    `is_operator`: it may see what the deployment does for all tenants, which any key may where
    there is one tenant. `key_id`: of the key that lets it in (`ApiKey.key_id`). `traceparent` and
    `tracestate`: the trace context of the spans of its jobs; "" without one.
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
    traceparent: str = ""
    tracestate: str = ""

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


def set_headers(scope: Scope, headers: Mapping[str, str]) -> None:
    """Adds headers to the response of this request, whatever sends it: a route or an error."""
    scope.setdefault("state", {}).setdefault(RESPONSE_HEADERS, {}).update(headers)


def note_refused(scope: Scope) -> None:
    """Notes that this request is refused because of a limit: it is counted for its tenant."""
    scope.setdefault("state", {})[REFUSED] = True


async def disconnect(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class JobTrace(Protocol):
    """Records the jobs of one traced request: see `api.http.traces.RequestTrace`."""

    def begin(self, jobs: Sequence[Job], response_id: str) -> None: ...
    def end(self, model: str, end: Finished | Failed, first_token_ms: float | None) -> None: ...
    def close(self, outcome: str) -> None: ...


def job_trace_in(scope: Scope) -> JobTrace | None:
    """Returns what records the jobs of the request that `scope` belongs to; None: not traced."""
    trace: JobTrace | None = scope.get("state", {}).get(JOB_TRACE)
    return trace
