"""Bounds of the document are those of the service: a value at a bound is accepted, and one beyond
it is a 400 that names the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.api_document import JSON, api_document, json_routes
from tests.support.running_service import MODEL, RunningService
from tests.support.scripted_worker import Script

TIMEOUT_S = 60
LEAST: dict[str, dict[str, Any]] = {  # a body without optional parameters
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"model": MODEL, "prompt": "a"},
    "/v1/responses": {"model": MODEL, "input": "a"},
    "/v1/responses/compact": {"model": MODEL, "input": "a"},
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "a"}],
    },
    "/v1/batches": {"endpoint": "/v1/chat/completions", "completion_window": "24h"},
    "/generate": {"prompt": "a", "stream": False},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
# Nothing is generated, or by another model (tests/integration/api/dialects/test_embeddings.py); or
# parameters exclude each other: tests/integration/api/jobs has them.
LEFT_OUT = {
    "/v1/embeddings",
    *("/v1/responses/input_tokens", "/v1/messages/count_tokens"),
    *("/v1/jobs/cancel", "/v1/dead-letters/requeue"),
}
# Parameters that one of these needs beside it.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_interval": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "/v1/responses top_logprobs": {"include": ["message.output_text.logprobs"]},
    "/v1/responses/compact top_logprobs": {"include": ["message.output_text.logprobs"]},
    "/v1/completions max_tokens": {"echo": True},
    "/v1/completions max_completion_tokens": {"echo": True},
    "thinking_token_budget": {"max_tokens": 9},
}
BIASES = {"type": "number", "minimum": -100, "maximum": 100}
ELSEWHERE = {
    "durability": "which levels a server accepts depends on its Redis",
    "tool_choice": "this model has no tools",
}


def branches(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from branches(api_document()["components"]["schemas"][name])
        return
    alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if not alternatives:
        yield schema
    for alternative in alternatives:
        yield from branches(alternative)


def entry(items: dict[str, Any], number: int) -> Any:
    """An entry of a list."""
    if "enum" in items:
        return items["enum"][0]
    if items.get("type") == "integer":
        return 1
    return f"{number}" if items.get("type") == "string" else None


def at_bounds(schema: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Values at the bounds of a schema, and values just beyond them."""
    inside, beyond = list(schema.get("enum", ())), []
    if "enum" in schema:
        beyond.append("beyond")
    step = 1 if schema.get("type") == "integer" else 1e-6
    for bound, sign in (("minimum", -1), ("maximum", 1)):
        if bound in schema:
            value = schema[bound]
            inside.append(value)
            beyond.append(value + sign * step * max(1, abs(value) if step < 1 else 1))
    if "minLength" in schema:
        inside.append("a" * schema["minLength"])
        beyond.append("a" * (schema["minLength"] - 1))
    if "maxLength" in schema:
        inside.append("a" * schema["maxLength"])
        beyond.append("a" * (schema["maxLength"] + 1))
    items = schema.get("items", {})
    if "maxItems" in schema and entry(items, 0) is not None:
        most = schema["maxItems"]
        inside.append([entry(items, number) for number in range(most)])
        beyond.append([entry(items, number) for number in range(most + 1)])
    beyond += [[value] for value in at_bounds(items)[1]] if items else []
    if "maxProperties" in schema:
        most, values = schema["maxProperties"], schema.get("additionalProperties", {})
        value = "a" if values.get("type") == "string" else 0
        if values != BIASES:  # the model has fewer tokens
            inside.append({f"{number}": value for number in range(most)})
        beyond.append({f"{number}": value for number in range(most + 1)})
        more, wrong = at_bounds(values)
        inside += [{"1": one} for one in more]
        beyond += [{"1": one} for one in wrong]
        if longest := schema.get("propertyNames", {}).get("maxLength"):
            inside.append({"a" * longest: value})
            beyond.append({"a" * (longest + 1): value})
    return inside, beyond


def cases(path: str) -> Iterator[tuple[str, Any, bool]]:
    """Yields a parameter, a value, and whether it is accepted."""
    content = api_document()["paths"][path]["post"]["requestBody"]["content"][JSON]
    (schema,) = branches(content["schema"])
    for name, described in schema["properties"].items():
        if "x-without-effect" in described or name in ELSEWHERE:
            continue
        found = [at_bounds(branch) for branch in branches(described)]
        for inside, beyond in found:
            yield from ((name, value, True) for value in inside)
            # beyond one alternative a value may be within another
            yield from ((name, value, False) for value in beyond if value not in ([], ""))


@pytest.fixture(scope="module")
def http(shared_service: RunningService) -> Iterator[httpx.Client]:
    shared_service.worker.script = Script(tokens_per_step=64)
    with httpx.Client(base_url=shared_service.base_url, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="module")
def file_id(http: httpx.Client) -> str:
    row = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}'
    sent = http.post("/v1/files", data={"purpose": "batch"}, files={"file": row})
    assert sent.status_code == 200, sent.text
    return str(sent.json()["id"])


@pytest.mark.parametrize("path", sorted(set(json_routes()) - LEFT_OUT))
def test_bounds_of_the_document_are_those_of_the_service(
    http: httpx.Client, file_id: str, path: str
) -> None:
    wrong = []
    for name, value, is_accepted in cases(path):
        body = {**LEAST[path], **BESIDE.get(f"{path} {name}", BESIDE.get(name, {})), name: value}
        if path == "/v1/batches":
            body = {"input_file_id": file_id, **body}
        answer = http.post(path, json=body)
        is_served = answer.status_code == 200 or '"job_lost"' in answer.text  # it scores no prompt
        if is_accepted != is_served or named(answer).partition(".")[0] != (
            "" if is_accepted else name
        ):
            wrong.append(f"{name} {str(value)[:60]} {is_accepted}: {answer.text[:200]}")
    assert wrong == []


def named(answer: httpx.Response) -> str:
    """The parameter that an error names; "" in other answers."""
    if answer.status_code != 400:
        return ""
    error = answer.json()["error"]
    return str(error.get("param") or error.get("details", {}).get("param"))
