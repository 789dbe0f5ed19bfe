"""Access: as whom a request was let in, and what it may see."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Access:
    """Made by AccessMiddleware for every request that it lets in.

    `scope` is the tenant whose jobs can be seen; None sees all: a server without keys has no
    tenants to keep apart. `sees_details`: of the deployment, at /health.
    """

    tenant: str = DEFAULT_TENANT
    scope: str | None = None
    sees_details: bool = True

    def sees(self, tenant: str) -> bool:
        return self.scope in (None, tenant)


OPEN = Access()
LIVENESS = Access(sees_details=False)  # a probe's: /health without a key, where there are keys


def set_access(scope: Scope, access: Access) -> None:
    scope.setdefault("state", {})["access"] = access


def access_of(request: Request) -> Access:
    access = request.scope.get("state", {}).get("access", OPEN)
    assert isinstance(access, Access)
    return access
