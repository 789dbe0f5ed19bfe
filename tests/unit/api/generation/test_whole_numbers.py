"""Every integer of every request may be written as `3.0`, and none as `true`, `3.5` or "3"."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from api.batches.protocol import BatchRequest
from api.dialects.chat.protocol import ChatRequest
from api.dialects.completions.protocol import CompletionRequest
from api.dialects.generate.protocol import GenerateRequest
from api.dialects.messages.protocol import CountTokensRequest, MessageRequest
from api.dialects.responses.protocol import ResponseRequest
from api.generation.protocol import RequestModel
from api.generation.validation import parse_request
from api.system.protocol import DetokenizeRequest, TokenizeRequest
from shared.messages import InvalidParameter

USER = {"role": "user", "content": "a"}
BODIES: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [USER], "stream": True},
    CompletionRequest: {"model": "m", "prompt": "a", "stream": True},
    GenerateRequest: {"model": "m", "prompt": "a", "stream": True},
    MessageRequest: {"model": "m", "messages": [USER], "max_tokens": 5, "stream": True},
    CountTokensRequest: {"model": "m", "messages": [USER]},
    ResponseRequest: {"model": "m", "input": "a"},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
    BatchRequest: {
        **{"input_file_id": "file-a", "endpoint": "/v1/responses", "completion_window": "24h"},
    },
}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
SHELL_CALL = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}
SHELL_OUTPUT = {"stdout": "", "stderr": "", "outcome": {"type": "exit"}}
LOCAL = {"type": "exec", "command": ["ls"], "env": {}}


def _change(number: object) -> dict[str, Any]:
    tool = {"type": "tool_definition", "definition": {**EDITOR, "max_characters": number}}
    return {"type": "tool_addition", "tool": tool}


# An integer within others: the members of the request that have it at its path.
WITHIN: dict[str, Any] = {
    "tools.[].max_characters": lambda n: {"tools": [{**EDITOR, "max_characters": n}]},
    "messages.[].content.[].tool.definition.max_characters": lambda n: {
        "messages": [USER, {"role": "system", "content": [_change(n)]}]
    },
    "messages.[].content.[].tool_changes.[].tool.definition.max_characters": lambda n: {
        "messages": [
            USER,
            {"role": "user", "content": [{"type": "compaction", "tool_changes": [_change(n)]}]},
        ]
    },
    "thinking.budget_tokens": lambda n: {"thinking": {"type": "enabled", "budget_tokens": n}},
    "input.[].action.max_output_length": lambda n: {
        "input": [{**SHELL_CALL, "action": {"commands": ["ls"], "max_output_length": n}}]
    },
    "input.[].action.timeout_ms": lambda n: {
        "input": [
            {**SHELL_CALL, "action": {"commands": ["ls"], "timeout_ms": n}},
            {"type": "local_shell_call", "call_id": "d", "action": {**LOCAL, "timeout_ms": n}},
        ]
    },
    "input.[].max_output_length": lambda n: {
        "input": [
            {
                **{"type": "shell_call_output", "call_id": "c", "output": []},
                "max_output_length": n,
            }
        ]
    },
    "input.[].output.[].outcome.exit_code": lambda n: {
        "input": [
            {
                **{"type": "shell_call_output", "call_id": "c"},
                "output": [{**SHELL_OUTPUT, "outcome": {"type": "exit", "exit_code": n}}],
            }
        ]
    },
    "expires_after.seconds": lambda n: {"expires_after": {"anchor": "completed_at", "seconds": n}},
    "output_expires_after.seconds": lambda n: {
        "output_expires_after": {"anchor": "created_at", "seconds": n}
    },
}


def integers(schema: dict[str, Any], root: dict[str, Any], at: tuple[str, ...]) -> Iterator[str]:
    """Paths of what the JSON schema has as integers; those of recursive schemas once."""
    name = schema.get("$ref", "").rpartition("/")[2]
    if name and root.get(name) is not None:
        rest = {key: value for key, value in root.items() if key != name}
        yield from integers(root[name], rest, at)
    if schema.get("type") == "integer":
        yield ".".join(at)
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from integers(inner, root, at)
    if isinstance(schema.get("items"), dict):
        yield from integers(schema["items"], root, (*at, "[]"))
    for key, inner in schema.get("properties", {}).items():
        yield from integers(inner, root, (*at, key))


def _integers_of(model: type[RequestModel]) -> list[str]:
    schema = model.model_json_schema()
    return sorted(set(integers(schema, schema.get("$defs", {}), ())))


def members(path: str, number: object) -> dict[str, Any]:
    """The members of a request that has a number at a path."""
    if path in WITHIN:
        return copy.deepcopy(WITHIN[path](number))  # type: ignore[no-any-return]
    name, *lists = path.split(".")
    value: Any = number
    for _ in lists:
        value = [value] if isinstance(value, list) else [7, value]
    return {name: value}


CASES = [(model, path) for model in BODIES for path in _integers_of(model)]


def test_all_dialects_have_integers() -> None:
    assert {model for model, _ in CASES} >= set(BODIES) - {TokenizeRequest}
    assert set(WITHIN) <= {path for _, path in CASES}


@pytest.mark.parametrize(("model", "path"), CASES)
def test_an_integer_may_be_written_with_a_point(model: type[RequestModel], path: str) -> None:
    def parsed(number: object) -> RequestModel:
        return parse_request({**BODIES[model], **members(path, number)}, model)

    assert repr(parsed(3.0)) == repr(parsed(3))
    texts = () if path == "prompt.[]" else ("3",)  # there a text is another prompt
    for wrong in (True, 3.5, 1e400, *texts):
        with pytest.raises(InvalidParameter) as refused:
            parsed(wrong)
        assert refused.value.param.startswith(path.partition(".")[0])


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponseRequest])
def test_a_bias_is_a_number_and_no_boolean(model: type[RequestModel]) -> None:
    biased = {**BODIES[model], "logit_bias": {"5": 8}}
    assert parse_request(biased, model) == parse_request(
        {**biased, "logit_bias": {"5": 8.0}}, model
    )
    with pytest.raises(InvalidParameter, match="logit_bias"):
        parse_request({**biased, "logit_bias": {"5": True}}, model)
