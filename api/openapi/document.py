"""The document itself: OpenAPI 3.1, from the routers, their docstrings and the table."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from api.dialects.messages.errors import error_status
from api.generation.protocol import RequestModel
from api.openapi.answers import MessagesError
from api.openapi.operation import JSON, STREAM, Operation, Parameter
from api.openapi.operations import OPERATIONS, Table
from api.sse import json_bytes

VERSION = "1"
_REF = "#/components/schemas/{name}"
_NAMES = {529: "Overloaded"}
_UNTOLD = Operation(tag="Undescribed")

Schema = dict[str, Any]


def openapi_document(routers: Sequence[APIRouter], table: Table = OPERATIONS) -> Schema:
    """All routes of `routers` that are not hidden; of one without a line little can be said."""
    types = {kind for row in table.values() for kind in (row.body, row.answer, row.error) if kind}
    bodies = [kind for kind in types if issubclass(kind, RequestModel)]
    ordered = sorted(types - {dict, *bodies}, key=lambda kind: kind.__name__)
    references, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    refs: dict[type, Schema] = dict(zip(ordered, references, strict=True))
    refs[dict] = {"type": "object"}
    for model in bodies:
        schema = model.model_json_schema(ref_template=_REF.replace("{name}", "{model}"))
        components |= schema.pop("$defs", {})
        components[model.__name__] = schema
        refs[model] = {"$ref": _REF.format(name=model.__name__)}
    paths: Schema = {}
    names = Counter(endpoint.__name__ for _, _, endpoint in routes_of(routers))
    for method, path, endpoint in routes_of(routers):
        row = table.get(f"{method} {path}", _UNTOLD)
        described = _operation(path, endpoint, row, refs)
        if names[endpoint.__name__] > 1:
            described["operationId"] += f"_{method.lower()}"
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": VERSION,
            "description": "Large language models served from a durable queue.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def routes_of(routers: Sequence[APIRouter]) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Method, path as OpenAPI writes it, and function of every route that is not hidden."""
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                for method in sorted(route.methods or ()):
                    yield method, route.path_format, route.endpoint


def _operation(
    path: str, endpoint: Callable[..., Any], row: Operation, refs: Mapping[type, Schema]
) -> Schema:
    doc = inspect.getdoc(endpoint) or ""
    summary, _, more = doc.partition("\n\n")
    described: Schema = {
        "operationId": endpoint.__name__,
        "tags": [row.tag],
        "summary": " ".join(summary.split()),
        "responses": _responses(row, refs),
    }
    if more:
        described["description"] = more
    if 401 in row.errors:  # without keys configured none is asked for
        described["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
    parameters = [_path_parameter(name) for name in re.findall(r"\{(\w+)\}", path)]
    parameters += [_parameter(one) for one in row.parameters]
    if parameters:
        described["parameters"] = parameters
    if row.body is not None:
        content = {row.body_media: {"schema": refs[row.body]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _responses(row: Operation, refs: Mapping[type, Schema]) -> Schema:
    schemas = {
        media: {"schema": {"type": "string"} if row.answer is None else refs[row.answer]}
        for media in row.media
    }
    if STREAM in schemas:
        schemas[STREAM] = {}  # this version of OpenAPI has no words for events
    error: Schema = {JSON: {"schema": refs[row.error]}} if row.media else {}
    responses = {"200": _response("OK", schemas)}
    for status, meaning in row.others.items():
        responses[str(status)] = _response(meaning, {} if status == 204 else schemas)
    for status in sorted(_shown(row)):
        name = _NAMES.get(status) or HTTPStatus(status).phrase
        responses.setdefault(str(status), _response(name, error))
    return responses


def _response(description: str, content: Schema) -> Schema:
    return {"description": description, **({"content": content} if content else {})}


def _shown(row: Operation) -> frozenset[int]:
    if row.error is not MessagesError:
        return row.errors
    return frozenset(map(error_status, row.errors))


def _path_parameter(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _parameter(one: Parameter) -> Schema:
    described: Schema = {"name": one.name, "in": one.where, "schema": dict(one.schema)}
    if one.why:
        described["description"] = one.why
    return described


# GET /openapi.json: the description of every route, for people's tools.


def openapi_router(routers: Sequence[APIRouter]) -> APIRouter:
    """Describes `routers` and itself. Made once, when the application is."""
    router = APIRouter()

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        """This document."""
        return Response(document, media_type="application/json")

    document = json_bytes(openapi_document([*routers, router]))
    return router
