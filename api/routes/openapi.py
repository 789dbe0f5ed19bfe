"""GET /openapi.json: the description of every route, for people's tools."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.openapi.document import openapi_document
from api.sse import json_bytes


def openapi_router(routers: Sequence[APIRouter]) -> APIRouter:
    """Describes `routers` and itself. Made once, when the application is."""
    router = APIRouter()

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        """This document."""
        return Response(document, media_type="application/json")

    document = json_bytes(openapi_document([*routers, router]))
    return router
