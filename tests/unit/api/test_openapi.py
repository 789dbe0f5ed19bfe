"""The document describes what the code does: every route, every parameter, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest
from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.testclient import TestClient

from api.batches.protocol import BatchRequest
from api.dialects.chat.protocol import ChatRequest
from api.dialects.completions.protocol import CompletionRequest
from api.dialects.embeddings.protocol import EmbeddingRequest
from api.dialects.generate.protocol import GenerateRequest
from api.dialects.messages.formatter import MessageContext, MessageFormatter
from api.dialects.messages.protocol import CountTokensRequest, MessageRequest
from api.dialects.responses.protocol import (
    CompactRequest,
    InputTokensRequest,
    ResponseRequest,
)
from api.files import routes as files
from api.generation.protocol import RequestModel
from api.generation.refused_parameters import members_without_field
from api.generation.validation import parse_request
from api.http.openapi import EVENT_SCHEMA, EVENTS
from api.jobs.bulk import CancelRequest, RequeueRequest
from api.main import create_app
from api.settings import ApiSettings
from api.system.protocol import DetokenizeRequest, TokenizeRequest
from shared.messages import InvalidParameter
from tests.support.api_document import (
    JSON,
    json_routes,
    operations,
    path_of_something,
)
from tests.support.claude_code import TURN
from tests.support.document_check import BodyCheck, Document

REPOSITORY = Path(__file__).parents[3]
REQUESTS: dict[str, type[RequestModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses": ResponseRequest,
    "/v1/responses/compact": CompactRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/v1/messages": MessageRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/batches": BatchRequest,
    "/v1/jobs/cancel": CancelRequest,
    "/v1/dead-letters/requeue": RequeueRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(ApiSettings(redis_url="redis://127.0.0.1:1"))


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    """As it is served; the route needs nothing of a running frontend."""
    response = TestClient(app, base_url="http://localhost").get("/openapi.json")
    assert response.status_code == 200
    served: dict[str, Any] = response.json()
    return served


def test_every_registered_route_is_documented(document: dict[str, Any]) -> None:
    """Routes as the sources declare them; pages are not part of the interface."""
    declared = set()
    for source in (REPOSITORY / "api").rglob("*.py"):
        text = source.read_text().replace('PATH + "', f'"{files.PATH}')
        text = re.sub(r"\bPATH\b", f'"{files.PATH}"', text)
        for method, path in re.findall(r'@router\.(get|head|post|delete)\(\s*"([^"]+)"', text):
            declared.add((method, path.replace(":path}", "}")))
    documented = {(method, path) for path, item in document["paths"].items() for method in item}
    assert documented == declared


def test_every_documented_route_is_there(app: FastAPI, document: dict[str, Any]) -> None:
    client = TestClient(app, base_url="http://localhost")
    for path, item in document["paths"].items():
        other = client.put(path_of_something(path))
        assert other.status_code == 405, path
        assert other.headers["allow"] == ", ".join(sorted(method.upper() for method in item)), path


def test_only_our_own_errors_are_documented(document: dict[str, Any]) -> None:
    for route, operation in operations():
        assert "422" not in operation["responses"], route
        assert "400" in operation["responses"], route
    assert not [name for name in document["components"]["schemas"] if "Validation" in name]


def test_errors_are_json(document: dict[str, Any]) -> None:
    for route, operation in operations():
        for status, response in operation["responses"].items():
            if int(status) >= 400 and not route.startswith("HEAD"):
                assert set(response["content"]) == {JSON}, (route, status)
    metrics = document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert set(metrics) == {"text/plain"}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    names = {piece.split('"')[0] for piece in text.split("#/components/schemas/")[1:]}
    assert names == set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_operation_ids_are_unique_and_every_route_has_a_sentence() -> None:
    found = [operation for _, operation in operations()]
    ids = [operation["operationId"] for operation in found]
    assert len(set(ids)) == len(ids)
    assert all(operation["description"] and operation["tags"] for operation in found)


def test_routes_that_need_a_key_say_so() -> None:
    for route, operation in operations():
        assert ("security" in operation) == ("401" in operation["responses"]), route


def test_every_json_route_is_in_the_table() -> None:
    assert set(json_routes()) == set(REQUESTS)


@pytest.mark.parametrize("path", REQUESTS)
def test_a_request_schema_has_every_parameter_that_is_read(
    document: dict[str, Any], path: str
) -> None:
    model = REQUESTS[path]
    content = document["paths"][path]["post"]["requestBody"]["content"]
    name = content[JSON]["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    fields = model.model_fields
    without_effect = set(members_without_field(model.kind))
    assert set(schema["properties"]) == set(fields) | without_effect
    required = {name for name, field in fields.items() if field.is_required()}
    assert set(schema.get("required", ())) == required
    assert schema["additionalProperties"] is False
    for parameter, described in schema["properties"].items():
        if parameter in fields and not fields[parameter].is_required():  # null counts as absent
            assert {"type": "null"} in described["anyOf"], parameter


def test_the_document_admits_a_turn_of_claude_code(document: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, **TURN}
    tools = [
        *body["tools"],
        {"type": "custom", "name": "own", "input_schema": {}},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ]
    schema = document["paths"]["/v1/messages"]["post"]["requestBody"]["content"][JSON]["schema"]
    jsonschema.validate({**body, "tools": tools}, {**schema, "components": document["components"]})


ANSWERED = {  # as the service and the SDKs send an earlier turn
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "reasoning_content": None,
    "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    ],
}
USER = {"role": "user", "content": "x"}
MARKED = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
SAID = {"type": "output_text", "text": "a", "annotations": [], "logprobs": None}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": None}
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [USER, ANSWERED, {"role": "tool", "tool_call_id": "c", "content": "1"}],
            **dict.fromkeys(("stop", "user", "audio", "functions", "tools", "seed"), None),
            "max_tokens": 8.0,
            "metadata": {"a": "b"},
            "reasoning_effort": "ultra",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": [MARKED], "name": None},
                {**USER, "cache_control": {"type": "ephemeral"}},
                {"role": "assistant", "content": "a", "provider_specific_fields": {"a": None}},
                USER,
            ],
            "temperature": 1,
            "seed": -1,
            "store": True,
            "verbosity": "low",
            "modalities": ["text"],
        },
    ),
    ("/v1/completions", {"prompt": ["a", "b"], "stop": ["a"] * 64, "suffix": ""}),
    ("/v1/completions", {"prompt": [[1, 2]], "max_completion_tokens": 5, "logprobs": 0}),
    ("/v1/responses", {"input": "hi", "metadata": None, "truncation": "auto"}),
    (
        "/v1/responses",
        {
            "input": [
                USER,
                {"role": "assistant", "content": [SAID]},
                CALLED,
                {"type": "function_call_output", "call_id": "c", "output": "1", "status": None},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": None}],
            "reasoning": {"effort": "high", "summary": "auto"},
            "text": {"verbosity": "low"},
            "max_output_tokens": 5.0,
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 5,
            "system": [MARKED],
            "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
            "metadata": {"user_id": "x"},
            "output_config": {"effort": "max"},
            "thinking": {"type": "adaptive"},
        },
    ),
    ("/generate", {"prompt": [1, 2], "stop": None, "max_tokens": 4.0}),
]


@pytest.mark.parametrize(("path", "members"), ACCEPTED)
def test_the_document_allows_what_is_accepted(
    document: dict[str, Any], path: str, members: dict[str, Any]
) -> None:
    body = {"model": "m", **members}
    parse_request(body, REQUESTS[path])
    schema = document["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"]
    whole = {**schema, "components": document["components"]}
    faults = jsonschema.Draft202012Validator(whole).iter_errors(body)
    assert [fault.message for fault in faults] == []


@pytest.mark.promise(
    "Clients: every route is documented, accepts no other bodies than documented ones, and returns "
    "only documented statuses and bodies"
)
def test_a_body_that_the_document_does_not_allow_is_reported() -> None:
    """By what every service of the tests has, so that the test which sent the body fails."""
    found: list[str] = []
    app = FastAPI()

    @app.post("/{name}")
    async def answer(name: str, body: Annotated[dict[str, int], Body()]) -> JSONResponse:
        return JSONResponse({"name": name, **body}, 400 if name == "bad" else 200)

    content = {"schema": {"properties": {"a": {}}, "additionalProperties": False}}
    document = app.openapi()
    document["components"] = {}
    operation = document["paths"]["/{name}"]["post"]
    operation["requestBody"]["content"][JSON] = content
    operation["responses"]["200"]["content"][JSON] = {"schema": {"required": ["a"]}}
    app.add_middleware(BodyCheck, document=Document(document), report=found.append)
    client = TestClient(app)
    client.post("/x", json={"a": 1})
    assert found == []
    client.post("/bad", json={"b": 1})
    client.post("/x", json={"a": 1, "b": 2})
    client.post("/x", json={})
    begin = "POST /{name}: the document does not allow"
    assert [one.partition(": the body")[0] for one in found] == [
        f"{begin} its response 400",
        f"{begin} a request that it accepts",
        f"{begin} its response 200",
    ]


def test_an_event_that_the_document_does_not_allow_is_reported() -> None:
    found: list[str] = []
    app = FastAPI()

    @app.post("/stream")
    async def answer(body: Annotated[list[str], Body()]) -> Response:
        return StreamingResponse(iter(body), media_type=EVENTS)

    document = app.openapi()
    document["components"] = {}
    closed = {"properties": {"a": {}}, "additionalProperties": False}
    responses = document["paths"]["/stream"]["post"]["responses"]
    responses["200"]["content"] = {EVENTS: {EVENT_SCHEMA: closed}}
    app.add_middleware(BodyCheck, document=Document(document), report=found.append)
    client = TestClient(app)
    client.post("/stream", json=[": ka\n\n", 'data: {"a"', ": 1}\n\n", "data: [DONE]\n\n"])
    assert found == []
    client.post("/stream", json=['data: {"a": 1}\n\nevent: e\nid: 1\nda', 'ta: {"b": 1}\n\n'])
    (reported,) = found
    assert reported.startswith("POST /stream: the document does not allow an event of its response")


def test_an_event_of_a_message_has_no_undocumented_member(document: dict[str, Any]) -> None:
    schema = document["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"][EVENTS]
    whole = {**schema[EVENT_SCHEMA], "components": document["components"]}
    validator = jsonschema.Draft202012Validator(whole)
    formatter = MessageFormatter(MessageContext(id="m", model="m", prompt_tokens=3))
    (start,) = formatter.beginning(cached_tokens=2)
    assert validator.is_valid(start)
    assert not validator.is_valid({**start, "another": 1})
    start["message"]["usage"]["another"] = 1
    assert not validator.is_valid(start)


def test_the_streams_that_report_a_lost_worker_have_its_events(document: dict[str, Any]) -> None:
    reporting = {
        route: operation["responses"]["200"]["content"][EVENTS][EVENT_SCHEMA]
        for route, operation in operations()
        if any(one["name"] == "penstock-events" for one in operation.get("parameters", ()))
    }
    generating = ("chat/completions", "completions", "messages", "responses")
    assert set(reporting) == {
        *(f"POST /v1/{path}" for path in generating),
        "POST /generate",
        "GET /v1/responses/{name}",
        "GET /v1/jobs/{name}/stream",
    }
    event = {"type": "recovery", "state": "resumed", "tokens": 3, "worker": "w", "after_s": None}
    for route, schema in reporting.items():
        whole = {**schema, "components": document["components"]}
        validator = jsonschema.Draft202012Validator(whole)
        assert validator.is_valid(event), route
        assert not validator.is_valid({**event, "state": "waiting", "after_s": 1.0}), route


def test_ignored_parameters_have_types_and_bounded_ones_bounds(
    document: dict[str, Any],
) -> None:
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["verbosity"]["anyOf"][0] == {"enum": ["low", "medium", "high"]}
    assert chat["audio"]["anyOf"] == [{"type": "null"}]
    for name, bound in (
        *(("temperature", "maximum"), ("top_p", "maximum"), ("n", "maximum"), ("seed", "minimum")),
        *(("tools", "maxItems"), ("stop_token_ids", "maxItems"), ("top_k", "minimum")),
        *(
            ("presence_penalty", "minimum"),
            ("priority", "maximum"),
            ("logit_bias", "maxProperties"),
        ),
    ):
        assert bound in chat[name]["anyOf"][0], name


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


def test_omitted_fields_are_never_null_and_constant_ones_are_required(
    document: dict[str, Any],
) -> None:
    schemas = document["components"]["schemas"]
    message, job = schemas["ChatMessage"], schemas["JobObject"]
    assert message["required"] == ["role", "content", "refusal"]
    assert message["properties"]["tool_calls"]["type"] == "array"
    assert message["properties"]["reasoning_content"]["type"] == "string"
    assert set(job["required"]) == set(job["properties"])


def test_a_request_may_have_a_thousand_tools() -> None:
    schema = {"type": "object"}
    for path, body, tool in (
        (
            "/v1/chat/completions",
            {"messages": [USER]},
            lambda name: {"type": "function", "function": {"name": name}},
        ),
        ("/v1/responses", {"input": "a"}, lambda name: {"type": "function", "name": name}),
        (
            "/v1/messages",
            {"messages": [USER], "max_tokens": 5},
            lambda name: {"name": name, "input_schema": schema},
        ),
    ):
        tools = [tool(f"tool_{number}") for number in range(1025)]
        parse_request({"model": "m", **body, "tools": tools[:1024]}, REQUESTS[path])
        with pytest.raises(InvalidParameter, match="tools"):
            parse_request({"model": "m", **body, "tools": tools}, REQUESTS[path])
