"""AccessMiddleware: who is let in, and as whom."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth.keys import ApiKey, KeyRing
from api.errors import invalid_api_key, key_disabled
from api.ids import parse_job_id
from api.services import Services

# Of the service itself, for load balancers, browsers and tools; and preflights, which have no key.
_FREE = re.compile(r"/|/dashboard|/static/[^/]*|/ready|/openapi\.json")
_HEALTH = "/health"
_METRICS = "/metrics"
_STREAM = re.compile(r"/v1/jobs/([^/]+)/stream")
TOKEN = "token"  # the query parameter that opens one stream without a key


class AccessMiddleware:
    """Pure ASGI. Stands inside of the error answers; raises ApiError (401, 403).

    A key is a bearer token or, as Anthropic's clients send it, `x-api-key`.
    """

    def __init__(
        self, app: ASGIApp, ring: KeyRing, metrics_key: str, *, monitoring_without_keys: bool
    ) -> None:
        self._app = app
        self._ring = ring
        self._metrics_key = metrics_key.encode()
        self._open_monitoring = (_HEALTH, _METRICS) if monitoring_without_keys else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            set_access(scope, await self._access(scope))
        await self._app(scope, receive, send)

    async def _access(self, scope: Scope) -> Access:
        path: str = scope["path"]
        if _FREE.fullmatch(path):
            return OPEN
        if path == _METRICS and self._metrics_key:
            self._check_metrics_key(scope)
            return OPEN
        if self._ring.is_open or path in self._open_monitoring:
            return OPEN
        presented = _presented(scope)
        if presented is None and path == _HEALTH:
            return LIVENESS
        if presented is None:
            access = await self._by_token(scope, path)
            if access is not None:
                return access
            raise invalid_api_key("An API key is required: 'Authorization: Bearer <key>'.")
        key = self._ring.find(presented)
        if key is None:
            raise invalid_api_key("This API key is not known.")
        return _access_of(key)

    def _check_metrics_key(self, scope: Scope) -> None:
        presented = (_presented(scope) or "").encode()
        if not hmac.compare_digest(presented, self._metrics_key):
            raise invalid_api_key("The metrics have a key of their own (METRICS_KEY).")

    async def _by_token(self, scope: Scope, path: str) -> Access | None:
        """None: there is no token, or it would open nothing here."""
        stream = _STREAM.fullmatch(path)
        token = QueryParams(scope["query_string"]).get(TOKEN)
        if stream is None or token is None or scope["method"] != "GET":
            return None
        job_id = parse_job_id(stream[1])
        if job_id is None:
            return None
        services: Services = scope["app"].state.services
        tenant = await services.stream_tokens.tenant_of(token, job_id)
        return Access(tenant, tenant)


def _access_of(key: ApiKey) -> Access:
    if key.is_disabled:
        raise key_disabled()
    return Access(key.tenant, None if key.is_operator else key.tenant)


def _presented(scope: Scope) -> str | None:
    headers = Headers(scope=scope)
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return headers.get("x-api-key")


# Access: as whom a request was let in, and what it may see.

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
