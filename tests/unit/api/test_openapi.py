"""The document says what the code does: every route, every member, and nothing else."""

from __future__ import annotations

import json
import warnings
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from api.generation.ignored_parameters import members_without_field
from api.generation.protocol import RequestModel
from api.main import create_app
from api.openapi.operations import OPERATIONS
from api.settings import ApiSettings


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(ApiSettings(redis_url="redis://127.0.0.1:1"))


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    """As it is served; the route needs nothing of a running frontend."""
    answer = TestClient(app, base_url="http://localhost").get("/openapi.json")
    assert answer.status_code == 200
    served: dict[str, Any] = answer.json()
    return served


def operations(document: dict[str, Any]) -> set[str]:
    return {
        f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item
    }


def test_every_registered_route_is_documented(app: FastAPI, document: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the framework minds that HEAD is named as GET is
        registered = operations(app.openapi())
    assert operations(document) == registered == set(OPERATIONS)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    names = {piece.split('"')[0] for piece in text.split("#/components/schemas/")[1:]}
    assert names <= set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_operation_ids_are_unique_and_every_route_has_a_sentence(document: dict[str, Any]) -> None:
    found = [operation for item in document["paths"].values() for operation in item.values()]
    ids = [operation["operationId"] for operation in found]
    assert len(set(ids)) == len(ids)
    assert all(operation["summary"] for operation in found)


@pytest.mark.parametrize("route", [name for name, row in OPERATIONS.items() if row.body])
def test_a_request_schema_has_every_member_that_is_read(
    document: dict[str, Any], route: str
) -> None:
    row, (method, path) = OPERATIONS[route], route.split()
    content = document["paths"][path][method.lower()]["requestBody"]["content"]
    name = content[row.body_media]["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    assert row.body is not None
    if not issubclass(row.body, RequestModel):
        return
    fields = row.body.model_fields
    inert = set(members_without_field(row.body.kind))
    assert set(schema["properties"]) == set(fields) | inert
    required = {name for name, field in fields.items() if field.is_required()}
    assert set(schema.get("required", ())) == required
    assert schema["additionalProperties"] is False
    for member, described in schema["properties"].items():
        if member in fields and not fields[member].is_required():  # null counts as absent
            assert {"type": "null"} in described["anyOf"], member


def test_every_generating_route_answers_json_or_events(document: dict[str, Any]) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}


def test_the_messages_dialect_has_its_own_errors(document: dict[str, Any]) -> None:
    responses = document["paths"]["/v1/messages"]["post"]["responses"]
    assert "529" in responses
    assert "503" not in responses
    schema = responses["529"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/MessagesError"}
