"""PlainRoute: a route whose function takes the request and gives the response, and nothing else.

What the framework does around functions with parameters (finding what they depend on, checking
what they return) has nothing to do there, and takes longer than reading the request.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class PlainRoute(APIRoute):
    """For `APIRouter(route_class=PlainRoute)`; the path has no parameters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler
