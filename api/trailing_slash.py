"""TrailingSlashMiddleware: a route of the API is the same with a slash behind it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_ROUTES = "/v1/"


class TrailingSlashMiddleware:
    """Pure ASGI. Takes one slash off the end of a path below `/v1/`, before anything looks at it.

    No redirect: clients drop bodies and keys on the way. Stands outermost, so that access, limits
    and routes all see the one path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path.startswith(_ROUTES) and path.endswith("/") and not path.endswith("//"):
            raw: bytes = scope.get("raw_path") or path.encode()
            scope = {**scope, "path": path[:-1], "raw_path": raw.removesuffix(b"/")}
        await self._app(scope, receive, send)
