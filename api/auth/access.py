"""AccessMiddleware: authenticates requests."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from dataclasses import replace

from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth.keys import KeyRing
from api.auth.stream_tokens import StreamTokens
from api.errors import invalid_api_key, key_disabled
from api.http.caller import Caller, caller_in, set_caller
from api.ids import parse_job_id

# Paths without a key: the service's own pages and probes.
_FREE = re.compile(r"/|/dashboard|/docs|/redoc|/static/[^/]*|/ready|/openapi\.json")
_HEALTH = "/health"
_METRICS = ("/metrics", "/metrics/deployment")
_STREAM = re.compile(r"/v1/jobs/([^/]+)/stream")
TOKEN = "token"  # the query parameter that opens one stream without a key


class AccessMiddleware:
    """Pure ASGI, inside of the error responses. Raises ApiError (401, 403).

    A key is a bearer token or, as Anthropic's clients send it, `x-api-key`.
    """

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing,
        stream_tokens: Callable[[Scope], StreamTokens],
        metrics_key: str,
        *,
        monitoring_without_keys: bool,
    ) -> None:
        """Gets the StreamTokens by a function: they are made when the application starts."""
        self._app = app
        self._ring = ring
        self._stream_tokens = stream_tokens
        self._metrics_key = metrics_key.encode()
        self._open_monitoring = (_HEALTH, *_METRICS) if monitoring_without_keys else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            set_caller(scope, await self._identified(scope, caller_in(scope)))
        await self._app(scope, receive, send)

    async def _identified(self, scope: Scope, caller: Caller) -> Caller:
        path: str = scope["path"]
        if _FREE.fullmatch(path):
            return caller
        if path in _METRICS and self._metrics_key:
            self._check_metrics_key(scope)
            return caller
        if self._ring.is_open or path in self._open_monitoring:
            return caller
        presented = _presented(scope)
        if presented is None and path == _HEALTH:
            return replace(caller, sees_details=False)
        if presented is None:
            tenant = await self._tenant_of_token(scope, path)
            if tenant is not None:
                return replace(caller, tenant=tenant, scope=tenant)
            raise invalid_api_key("An API key is required: 'Authorization: Bearer <key>'.")
        key = self._ring.find(presented)
        if key is None:
            raise invalid_api_key("Invalid API key.")
        if key.is_disabled:
            raise key_disabled()
        return replace(caller, tenant=key.tenant, scope=None if key.is_operator else key.tenant)

    def _check_metrics_key(self, scope: Scope) -> None:
        presented = (_presented(scope) or "").encode()
        if not hmac.compare_digest(presented, self._metrics_key):
            raise invalid_api_key("The metrics require their own key (PENSTOCK_METRICS_KEY).")

    async def _tenant_of_token(self, scope: Scope, path: str) -> str | None:
        """Returns the tenant of a token for this stream; None without a token. Raises ApiError."""
        stream = _STREAM.fullmatch(path)
        token = QueryParams(scope["query_string"]).get(TOKEN)
        if stream is None or token is None or scope["method"] != "GET":
            return None
        job_id = parse_job_id(stream[1])
        if job_id is None:
            return None
        return await self._stream_tokens(scope).tenant_of(token, job_id)


def _presented(scope: Scope) -> str | None:
    headers = Headers(scope=scope)
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return headers.get("x-api-key")
