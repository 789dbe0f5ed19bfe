"""PlainRoute: a route whose function takes the request and gives the response, and nothing else.

What the framework does around functions with parameters (finding what they depend on, checking
what they return) has nothing to do there, and takes longer than reading the request. Nor has its
search for the route: these are found by their path.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from api.jobs.expected_job import forget_expected

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class PlainRoute(APIRoute):
    """For `APIRouter(route_class=PlainRoute)`; the path has no parameters."""

    def get_route_handler(self) -> Handler:
        handler: Handler = self.endpoint
        return handler


class PlainRoutesMiddleware:
    """Pure ASGI, the innermost. Answers the requests of PlainRoutes, and passes the others on.

    Exceptions are for the error answers. A job that was expected and not made is forgotten here.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = {
            (method, route.path): route
            for route in routes
            if isinstance(route, PlainRoute)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http":
            route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            response = await route.endpoint(Request(scope, receive, send))
            await response(scope, receive, send)
        finally:
            await forget_expected(scope)
