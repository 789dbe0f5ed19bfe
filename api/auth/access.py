"""AccessMiddleware: authenticates requests."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from dataclasses import replace

from fastapi import APIRouter
from starlette.datastructures import Headers, QueryParams
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.keys import KeyRing
from api.auth.stream_tokens import StreamTokens
from api.http.caller import Caller, caller_in, set_caller
from api.http.shares import Payer, payer
from api.ids import parse_job_id
from api.request_errors import invalid_api_key, key_disabled, key_revoked, operator_required
from shared.tasks import cancel_and_wait

# Routes without a key: the service's own pages and probes.
_FREE = frozenset(
    {"/", "/dashboard", "/docs", "/redoc", "/static/{file_name}", "/ready", "/openapi.json"}
)
_HEALTH = "/health"
_METRICS = ("/metrics", "/metrics/deployment")
_STREAM = "/v1/jobs/{name}/stream"
_FEED = "/v1/deployment/stream"
TOKEN = "token"  # the query parameter that opens one stream without a key


class AccessMiddleware:
    """Pure ASGI, inside of the error responses. Raises ApiError (401, 403).

    A key is a bearer token or, as Anthropic's clients send it, `x-api-key`. What a request needs is
    up to the route that will serve it, found as the router finds it. A key that no longer allows
    what it has opened (`KeyRing.allows`) ends it: the next message of the request is an ApiError
    (401).
    """

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing,
        routers: Sequence[APIRouter],
        stream_tokens: Callable[[Scope], StreamTokens],
        metrics_key: str,
        *,
        monitoring_without_keys: bool,
    ) -> None:
        """Gets the StreamTokens by a function: they are made when the application starts."""
        self._app = app
        self._ring = ring
        self._routers = routers
        self._stream_tokens = stream_tokens
        self._metrics_key = metrics_key.encode()
        self._open_monitoring = (_HEALTH, *_METRICS) if monitoring_without_keys else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = await self._identified(scope, caller_in(scope))
        set_caller(scope, caller)
        if not caller.key_id:
            await self._app(scope, receive, send)
            return
        payer.set(Payer(caller.tenant, caller.scope is None))
        # A second tenant's first key ends no stream of the first one but that of the deployment.
        is_operator = caller.is_operator and scope["path"] == _FEED
        with self._ring.in_use(replace(caller, is_operator=is_operator)) as revoked:
            await self._app(scope, _until_revoked(receive, revoked), send)

    async def _identified(self, scope: Scope, caller: Caller) -> Caller:
        if self._ring.is_open and not self._metrics_key:
            return caller
        route = self._route(scope)
        if route in _FREE:
            return caller
        if route in _METRICS and self._metrics_key:
            self._check_metrics_key(scope)
            return caller
        if self._ring.is_open or route in self._open_monitoring:
            return caller
        presented = _presented(scope)
        if presented is None and route == _HEALTH:
            return replace(caller, is_known=False, is_operator=False)
        if presented is None:
            by_token = await self._caller_by_token(scope, caller) if route == _STREAM else None
            if by_token is not None:
                return by_token
            raise invalid_api_key("An API key is required: 'Authorization: Bearer <key>'.")
        key = self._ring.find(presented)
        if key is None:
            raise invalid_api_key("Invalid API key.")
        if key.is_disabled:
            raise key_disabled()
        is_operator = self._ring.is_operator(key)
        if route in _METRICS and not is_operator:
            raise operator_required(
                "Metrics cover all tenants and require an operator's key or PENSTOCK_METRICS_KEY."
            )
        return replace(
            caller,
            tenant=key.tenant,
            scope=None if key.is_operator else key.tenant,
            is_operator=is_operator,
            key_id=key.key_id,
        )

    def _route(self, scope: Scope) -> str:
        """Returns the template of the route that will serve the request, such as `/v1/jobs/{name}`;
        "" without one."""
        partial = ""
        for router in self._routers:
            for route in router.routes:
                match = route.matches(scope)[0]
                if match is Match.FULL:
                    return str(getattr(route, "path", ""))
                if match is Match.PARTIAL and not partial:
                    partial = str(getattr(route, "path", ""))
        return partial

    def _check_metrics_key(self, scope: Scope) -> None:
        presented = (_presented(scope) or "").encode()
        if not hmac.compare_digest(presented, self._metrics_key):
            raise invalid_api_key("The metrics require their own key (PENSTOCK_METRICS_KEY).")

    async def _caller_by_token(self, scope: Scope, caller: Caller) -> Caller | None:
        """Returns the caller of a token for this stream; None without a token. Raises ApiError."""
        token = QueryParams(scope["query_string"]).get(TOKEN)
        if token is None or scope["method"] != "GET":
            return None
        job_id = parse_job_id(scope["path"].split("/")[3])
        if job_id is None:
            return None
        tenant, key_id = await self._stream_tokens(scope).opened_by(token, job_id)
        caller = replace(caller, tenant=tenant, scope=tenant, is_operator=False, key_id=key_id)
        if not self._ring.allows(caller):
            raise invalid_api_key("The key that issued the token in the URL is no longer valid.")
        return caller


def _until_revoked(receive: Receive, revoked: asyncio.Future[None]) -> Receive:
    """Returns `receive` that raises ApiError (401) once `revoked` is done."""

    async def received() -> Message:
        message = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((message, revoked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not message.done():
                await cancel_and_wait(message)
        if revoked.done():
            raise key_revoked()
        return message.result()

    return received


def has_operators_key(ring: KeyRing, scope: Scope) -> bool:
    """Returns whether the request has a key with `KeyRing.is_operator`, or none is needed."""
    if ring.is_open:
        return True
    key = ring.find(_presented(scope) or "")
    return key is not None and not key.is_disabled and ring.is_operator(key)


def _presented(scope: Scope) -> str | None:
    headers = Headers(scope=scope)
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return headers.get("x-api-key")
