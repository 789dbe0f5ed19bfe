"""Caller: the identity, the permissions and the ids of one request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request
from starlette.types import Scope

from shared.messages import Idempotency

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, and what it is called. A row of a batch has one too.

    RequestIdMiddleware makes it with the ids, AccessMiddleware adds the identity, and
    `api.jobs.idempotency` the job of an idempotency key.

    `request_id` names the request in headers and logs; for a request that makes a job it is the
    public id of `job_id`. `scope`: the tenant whose jobs the caller may see; None: all, for
    operators and for a server without keys. `sees_details`: of the deployment, at /health.
    """

    request_id: str
    job_id: str | None = None
    client_request_id: str | None = None
    tenant: str = DEFAULT_TENANT
    scope: str | None = None
    sees_details: bool = True
    idempotency: Idempotency | None = None

    def sees(self, tenant: str) -> bool:
        """Returns whether jobs of `tenant` are visible to the caller."""
        return self.scope in (None, tenant)

    def with_job(self, job_id: str, idempotency: Idempotency) -> Caller:
        """Returns the caller of a request that stands for the job of its idempotency key."""
        assert self.job_id is not None, "the route makes no jobs"
        request_id = self.request_id.removesuffix(self.job_id) + job_id
        return replace(self, request_id=request_id, job_id=job_id, idempotency=idempotency)


def set_caller(scope: Scope, caller: Caller) -> None:
    scope.setdefault("state", {})["caller"] = caller


def caller_in(scope: Scope) -> Caller:
    """Returns the caller of the request that `scope` belongs to."""
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


async def get_caller(request: Request) -> Caller:
    """Returns the caller, as of now: the job of an idempotency key is known after the body."""
    return caller_in(request.scope)


CallerDep = Annotated[Caller, Depends(get_caller)]
