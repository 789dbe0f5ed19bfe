"""The OpenAPI document: parts that FastAPI does not derive from the declarations of the routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from types import UnionType
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from api.http.sse import json_bytes
from api.on_demand import load_part

VERSION = "1"

# Statuses by what a route does. Some come from before any route: a head that is too large or not
# HTTP (400, 431), an origin or a host that is not allowed (403, 421), a body over the limit (413),
# a key that is missing (401, 403) or used too often (429).
FREE = frozenset({400, 403, 413, 421, 431, 500})  # needs no key
KEYED = FREE | {401}
ANY = KEYED | {429}
STORE = ANY | {503}  # reads the store
NAMED = STORE | {404}  # something with a name
KEPT = NAMED | {410}  # a job, or its text
BODY = NAMED | {408, 415}  # reads a body, which names a model
JOB = BODY | {409, 502, 504}  # submits a job and waits for its end

Described = dict[int | str, dict[str, Any]]  # the `responses` of a route

_PHRASES = {529: "Overloaded"}
Absent = SkipJsonSchema[None]  # the type of a member that is left out, and never null
EVENTS = "text/event-stream"
EVENT_SCHEMA = "x-event-schema"  # OpenAPI 3.1 describes no events
_SCHEMAS = "#/components/schemas/"
_VALIDATION = ("HTTPValidationError", "ValidationError")  # FastAPI's, which are never sent


class ErrorObject(BaseModel):
    """The error's message, its type, the parameter at fault, and a code to branch on."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every error response, and of an error event."""

    error: ErrorObject


def errors(statuses: Iterable[int], model: type[BaseModel] | UnionType = Error) -> Described:
    """Returns the error responses of a route; `model`: of a body, a union for several dialects."""
    return {
        status: {"model": model, "description": _PHRASES.get(status) or HTTPStatus(status).phrase}
        for status in sorted(statuses)
    }


def statuses(numbers: Iterable[int]) -> Described:
    """Returns the error responses of a HEAD, which have no body."""
    return {status: {"description": HTTPStatus(status).phrase} for status in sorted(numbers)}


def streamed(
    statuses: Iterable[int], model: type[BaseModel] = Error, events: Any = None
) -> Described:
    """Returns the responses of a route that can stream events, and its errors. `events`: the type
    of the data of an event, whose schema the document has as an extension."""
    described: dict[str, Any] = {}
    if events is not None:
        described[EVENT_SCHEMA] = _schema_of(events)
    return {200: {"content": {EVENTS: described}}, **errors(statuses, model)}


def _schema_of(events: Any) -> dict[str, Any]:
    return TypeAdapter(events).json_schema(ref_template=f"{_SCHEMAS}{{model}}")


def parameters(*undeclared: tuple[str, str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the `openapi_extra` of a route with parameters that its function does not declare:
    their names, places ("query", "header") and schemas."""
    return {
        "parameters": [
            {"name": name, "in": place, "schema": dict(schema)}
            for name, place, schema in undeclared
        ]
    }


_KEY_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"}
_KEY = ("idempotency-key", "header", _KEY_SCHEMA)
EVENTS_HEADER = ("penstock-events", "header", {"type": "string", "enum": ["recovery"]})
IDEMPOTENT = parameters(_KEY)
GENERATES = parameters(_KEY, EVENTS_HEADER)


def openapi_router() -> APIRouter:
    """Returns the route of the document, which is made at its first request."""
    router = APIRouter(tags=["Service"])

    @router.get("/openapi.json", responses=errors(FREE), response_model=dict[str, Any])
    async def openapi(request: Request) -> Response:
        """Returns the OpenAPI document of all routes."""
        document = await asyncio.to_thread(request.app.openapi)
        return Response(json_bytes(document), media_type="application/json")

    return router


def customize_openapi(app: FastAPI) -> None:
    """Replaces `app.openapi` by one that knows of keys and of our own validation errors."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _customized(
                get_openapi(
                    title="Penstock",
                    version=VERSION,
                    description="Large language models served from a durable queue.",
                    routes=app.routes,
                    separate_input_output_schemas=False,
                )
            )
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _define_recoveries(operation: dict[str, Any]) -> None:
    """Adds the events of lost workers to the schema of a stream's events, if a header asks for
    them."""
    if EVENTS_HEADER[0] in (one["name"] for one in operation.get("parameters", ())):
        content = operation["responses"]["200"]["content"][EVENTS]
        recovery = _schema_of(load_part("recoveries").Recovery)
        others = dict(content.get(EVENT_SCHEMA, {}))
        content[EVENT_SCHEMA] = {
            "$defs": recovery.pop("$defs") | others.pop("$defs", {}),
            "if": {"properties": {"type": {"const": "recovery"}}, "required": ["type"]},
            "then": recovery,
            "else": others,
        }


def _define_events(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Moves the definitions of the schema of a stream's events to those of the document."""
    content = operation["responses"].get("200", {}).get("content", {}).get(EVENTS, {})
    if EVENT_SCHEMA in content:
        schema = dict(content[EVENT_SCHEMA])
        for name, definition in schema.pop("$defs").items():
            assert schemas.setdefault(name, definition) == definition, f"two schemas {name}"
        content[EVENT_SCHEMA] = schema


def _customized(document: dict[str, Any]) -> dict[str, Any]:
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"].pop("422", None)
            if "401" in operation["responses"]:  # without keys configured none is needed
                operation["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
    components = document["components"]
    for item in document["paths"].values():
        for operation in item.values():
            _define_recoveries(operation)
            _define_events(operation, components["schemas"])
    for name in _VALIDATION:
        components["schemas"].pop(name, None)
    load_part("reference").describe(document)
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return document
