"""Tools of Responses that are no plain functions, as Codex and the SDKs send them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from openai import BaseModel, OpenAI
from openai.types.responses import Response

from api.dialects.responses.conversation import SUMMARY_REQUEST
from tests.integration.api.chat_service import (
    ECHO_HERMES,
    ENFORCED,
    STOP,
    hermes_call,
    module_chat_service,
    saying,
)
from tests.support.redis_server import redis_url  # noqa: F401
from tests.support.service_fixtures import openai_client
from tests.support.sse_readers import payloads

PATCH = '*** Begin Patch\n*** Add File: a "b".txt\n+é \\ 😀\n*** End Patch\n'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "name": "apply_patch", "description": "Applies a patch."},
    {
        "type": "namespace",
        "name": "mcp__maps",
        "description": "Maps.",
        "tools": [
            {"type": "function", "name": "find", "parameters": CITY, "strict": False},
            {"type": "custom", "name": "note"},
        ],
    },
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "tool_search", "execution": "client", "parameters": CITY},
    {"type": "web_search", "external_web_access": True},
]


base_url = module_chat_service(ECHO_HERMES, ENFORCED)
client = openai_client


def respond(base_url: str, text: str, **members: Any) -> httpx.Response:
    body = {"model": ECHO_HERMES, "input": saying(text), "stop": STOP, "tools": TOOLS, **members}
    answer = httpx.post(f"{base_url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def _without_ids(items: Sequence[BaseModel]) -> list[dict[str, Any]]:
    """The items as JSON, without what differs between two of the same kind."""
    found = []
    for item in items:
        members = item.to_dict()
        for part in members.get("content") or ():  # type: ignore[attr-defined]
            part.pop("logprobs", None)
        found.append({key: value for key, value in members.items() if key not in ("id", "call_id")})
    return found


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        (
            "apply_patch",
            {"input": PATCH},
            {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
        ),
        (
            "mcp__maps__find",
            {"city": "Oslo"},
            {"type": "function_call", "name": "find", "namespace": "mcp__maps"},
        ),
        (
            "mcp__maps__note",
            {"input": "x"},
            {"type": "custom_tool_call", "name": "note", "namespace": "mcp__maps", "input": "x"},
        ),
        (
            "local_shell",
            {"command": ["ls", "-l"], "timeout_ms": 9},
            {
                "type": "local_shell_call",
                "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 9},
            },
        ),
        ("local_shell", {"command": "ls"}, {"type": "function_call", "name": "local_shell"}),
        (
            "shell",
            {"commands": ["ls"]},
            {
                "type": "shell_call",
                "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None},
            },
        ),
        (
            "tool_search",
            {"city": "Oslo"},
            {"type": "tool_search_call", "execution": "client", "arguments": {"city": "Oslo"}},
        ),
    ],
)
def test_a_call_is_the_item_of_its_tool_whole_and_streamed(
    base_url: str, name: str, arguments: dict[str, Any], item: dict[str, Any]
) -> None:
    said = hermes_call(name, json.dumps(arguments))
    answer = respond(base_url, said)
    assert answer.headers["x-penstock-ignored"] == "tools.web_search"
    (whole,) = answer.json()["output"]
    assert item.items() <= whole.items()
    assert whole["call_id"]

    events = payloads(respond(base_url, said, stream=True).text)
    done = next(event for event in events if event["type"] == "response.output_item.done")["item"]
    unnamed = {"id", "call_id"}
    assert {key: value for key, value in done.items() if key not in unnamed} == {
        key: value for key, value in whole.items() if key not in unnamed
    }
    if done["type"] == "custom_tool_call":
        kind = "response.custom_tool_call_input"
        deltas = [event["delta"] for event in events if event["type"] == f"{kind}.delta"]
        assert "".join(deltas) == done["input"]
        (end,) = [event for event in events if event["type"] == f"{kind}.done"]
        assert end["input"] == done["input"]


def test_a_history_of_every_kind_comes_back(base_url: str) -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    items = [
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": PATCH},
        {
            "type": "custom_tool_call_output",
            "call_id": "a",
            "output": [
                {"type": "input_text", "text": "Done."},
                {
                    "type": "input_image",
                    "image_url": "data:image/png;base64,AA==",
                    "detail": "high",
                },
            ],
        },
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "x"}},
        {
            **{"type": "function_call", "call_id": "b", "name": "find", "arguments": "{}"},
            "namespace": "mcp__maps",
        },
        {"type": "function_call_output", "call_id": "b", "output": "here"},
        {
            "type": "local_shell_call",
            "id": "l",
            "call_id": "c",
            "action": action,
            "status": "completed",
        },
        {"type": "local_shell_call_output", "id": "l", "output": "{}"},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"], "timeout_ms": None}},
        {
            "type": "shell_call_output",
            "call_id": "d",
            "output": [
                {"stdout": "out", "stderr": "", "outcome": {"type": "exit", "exit_code": 3}}
            ],
        },
        {
            **{"type": "apply_patch_call", "call_id": "e", "status": "completed"},
            "operation": {"type": "delete_file", "path": "x"},
        },
        {"type": "apply_patch_call_output", "call_id": "e", "status": "failed", "output": "no"},
        {
            **{"type": "tool_search_call", "call_id": "f", "execution": "client"},
            "arguments": {"city": "Oslo"},
        },
        {
            **{"type": "tool_search_output", "call_id": "f", "execution": "client"},
            "tools": [{"type": "function", "name": "found", "defer_loading": True}],
        },
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "reasoning", "summary": [], "encrypted_content": None},
    ]
    said = hermes_call("found", "{}")
    answer = respond(base_url, said, input=[*saying(said), *items])
    assert answer.json()["output"][0]["name"] == "found"  # a tool that only the search has found
    assert set(answer.headers["x-penstock-ignored"].split(", ")) == {
        "tools.web_search",
        "tools.defer_loading",
        "input.output.input_image",
        "input.web_search_call",
        "input.encrypted_content",
    }
    tail = respond(base_url, said, input=[*items, *saying("x")], stop=[]).json()
    assert tail["status"] in ("completed", "incomplete")


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [
        ("regex", "[a-c]{2,4}\\n", "[a-c]{2,4}\n"),
        (
            "lark",
            'start: begin line~1..2 END\nbegin: "*** Begin" LF\n'
            'line: "+" /[x-z]{1,3}/ LF -> text\nEND: "*** End" | "!"\n%import common.LF\n',
            r"\*\*\* Begin\n(\+[x-z]{1,3}\n){1,2}(\*\*\* End|!)",
        ),
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "say"}])
def test_the_input_of_a_forced_call_is_kept_to_its_grammar(
    base_url: str, syntax: str, definition: str, pattern: str, choice: Any
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools = [{"type": "custom", "name": "say", "format": form}]
    for seed in range(4):
        body = {"model": ENFORCED, "input": "Go.", "tools": tools, "tool_choice": choice}
        more = {"seed": seed, "max_output_tokens": 200, "reasoning": {"effort": "none"}}
        answer = httpx.post(f"{base_url}/v1/responses", json={**body, **more}, timeout=60)
        assert answer.status_code == 200, answer.text
        call = answer.json()["output"][-1]
        assert call["type"] == "custom_tool_call"
        assert re.fullmatch(pattern, call["input"]), call


REGULAR = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}
RECURSIVE = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"\n'}


def custom(*forms: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "custom", "name": f"say{index}", "format": form}
        for index, form in enumerate(forms)
    ]


SPACE = {"type": "namespace", "name": "space", "tools": custom({"type": "text"}, RECURSIVE)}


@pytest.mark.parametrize(
    ("model", "members", "reported"),
    [
        (ENFORCED, {"tools": custom(REGULAR, {"type": "text"})}, None),
        (ENFORCED, {"tools": custom(REGULAR, {"type": "text"}, RECURSIVE)}, "tools.2.format"),
        (ENFORCED, {"tools": [*TOOLS[:1], SPACE]}, "tools.1.tools.1.format"),
        (ECHO_HERMES, {"tools": custom({"type": "text"}, REGULAR)}, "tools.1.format"),
        (
            ENFORCED,
            {
                "tools": TOOLS[:1],
                "input": [
                    *saying("x"),
                    {"type": "additional_tools", "role": "developer", "tools": custom(RECURSIVE)},
                ],
            },
            "input.tools.format",
        ),
    ],
    ids=["regular", "recursive", "in a namespace", "not enforced", "of an item"],
)
def test_grammars_that_are_not_enforced_are_reported(
    base_url: str, model: str, members: dict[str, Any], reported: str | None
) -> None:
    body = {"model": model, "input": "x", "max_output_tokens": 1, **members}
    answer = httpx.post(f"{base_url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-penstock-ignored") == reported
    counted = httpx.post(f"{base_url}/v1/responses/input_tokens", json=body, timeout=60)
    assert counted.status_code == 200, counted.text
    assert counted.headers.get("x-penstock-ignored") == reported


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": TOOLS[-1:], "tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [
                    {
                        **{"type": "custom", "name": "say"},
                        "format": {"type": "grammar", "syntax": "regex", "definition": "(a"},
                    }
                ]
            },
            "tools.0.format.definition",
        ),
        (
            {"input": [{"type": "custom_tool_call_output", "call_id": "x", "output": ""}]},
            "input.0.call_id",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    base_url: str, members: dict[str, Any], param: str
) -> None:
    body = {"model": ENFORCED, "input": "x", "tools": TOOLS, **members}
    answer = httpx.post(f"{base_url}/v1/responses", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_image_of_the_user_is_refused_with_its_code(base_url: str) -> None:
    content = [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    body = {"model": ECHO_HERMES, "input": [{"role": "user", "content": content}]}
    error = httpx.post(f"{base_url}/v1/responses", json=body, timeout=60).json()["error"]
    assert error["code"] == "image_not_supported"
    assert "this model does not support image input" in error["message"]


def test_the_sdk_reads_the_items(client: OpenAI) -> None:
    response = client.responses.create(
        model=ECHO_HERMES,
        input=saying(hermes_call("apply_patch", json.dumps({"input": PATCH}))),  # type: ignore[arg-type]
        tools=TOOLS,  # type: ignore[arg-type]
        extra_body={"stop": STOP},
    )
    call = response.output[0]
    assert call.type == "custom_tool_call"
    assert call.input == PATCH
    more = client.responses.create(
        model=ECHO_HERMES,
        previous_response_id=response.id,
        input=[{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}],
        tools=TOOLS,  # type: ignore[arg-type]
        max_output_tokens=5,
    )
    assert more.status in ("completed", "incomplete")


def test_references_stand_for_the_items_of_a_stored_response(base_url: str) -> None:
    said = "<think>\nhm\n</think>\nI look." + hermes_call("mcp__maps__find", '{"city": "Oslo"}')
    with OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:

        def create(*items: Any, **more: Any) -> Response:
            made = client.responses.create(
                model=ECHO_HERMES,
                input=list(items),
                tools=TOOLS,  # type: ignore[arg-type]
                extra_body={"stop": STOP},
                **more,
            )
            assert isinstance(made, Response)
            return made

        first = create(*saying(said))
        asked = client.responses.input_items.list(first.id, order="asc").data
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        call = first.output[-1]
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "north"}
        items = [item.to_dict() for item in (*asked, *first.output)]
        named = [{"type": "item_reference", "id": item["id"]} for item in items]
        bare = [{"id": item["id"]} for item in items]
        again = [
            create(*earlier, result, max_output_tokens=400) for earlier in (items, named, bare)
        ]
        sent, *referred = [_without_ids(response.output) for response in again]
        assert referred == [sent, sent]
        tokens = {response.usage.input_tokens for response in again if response.usage}
        assert len(tokens) == 1
        kept = [client.responses.input_items.list(made.id, order="asc").data for made in again]
        assert [_without_ids(listed) for listed in kept[1:]] == [_without_ids(kept[0])] * 2
        assert {item.id for item in kept[1]}.isdisjoint(item["id"] for item in items)


def test_a_compacted_conversation_goes_on_from_its_summary(client: OpenAI) -> None:
    history: list[Any] = saying("The key is 42.")
    made = client.responses.compact(model=ECHO_HERMES, input=history, extra_body={"stop": STOP})
    assert made.object == "response.compaction"
    (item,) = made.output
    assert item.type == "compaction"
    assert made.usage.output_tokens > 0
    sent = [item.to_dict(), {"role": "user", "content": "And?"}]
    after = client.responses.create(model=ECHO_HERMES, input=sent)  # type: ignore[arg-type]
    assert "The key is 42." in after.output_text  # the model repeats its prompt


def test_the_prompt_of_a_summary_is_the_conversations_with_its_tools(base_url: str) -> None:
    url = f"{base_url}/v1/responses"
    history = saying("x")
    asked: list[Any] = [*history, {"role": "user", "content": SUMMARY_REQUEST}]
    counts = []
    for tools in (TOOLS, []):
        body = {"model": ECHO_HERMES, "input": history, "tools": tools, "max_output_tokens": 2}
        made = httpx.post(f"{url}/compact", json=body, timeout=60).json()
        as_turn = {"model": ECHO_HERMES, "input": asked, "tools": tools}
        counted = httpx.post(f"{url}/input_tokens", json=as_turn, timeout=60).json()
        assert made["usage"]["input_tokens"] == counted["input_tokens"]
        counts.append(counted["input_tokens"])
    assert counts[0] > counts[1]


def test_a_trigger_makes_the_same_item_as_a_stream(base_url: str) -> None:
    items = [*saying("The key is 42."), {"type": "compaction_trigger"}]
    events = payloads(respond(base_url, "", input=items, stream=True).text)
    kinds = [event["type"] for event in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    (item,) = events[-1]["response"]["output"]
    assert item["type"] == "compaction"


def test_input_tokens_are_those_that_a_response_uses(base_url: str) -> None:
    members = {"model": ECHO_HERMES, "input": saying("x"), "tools": TOOLS, "instructions": "Be."}
    url = f"{base_url}/v1/responses"
    counted = httpx.post(f"{url}/input_tokens", json=members, timeout=60).json()
    used = httpx.post(url, json={**members, "max_output_tokens": 1}, timeout=60).json()["usage"]
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": used["input_tokens"],
    }


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_a_jobs_answer_has_reasoning_and_calls_apart(base_url: str, path: str) -> None:
    """As its own dialect shows them, whichever that is."""
    arguments = json.dumps({"city": "Oslo 😀"}, ensure_ascii=False)
    text = f"<think>\nMaps first.\n</think>\n\nI look.\n{hermes_call('find', arguments)}"
    messages = "input" if path == "responses" else "messages"
    tool = {"type": "function", "name": "find", "parameters": CITY}
    if path != "responses":
        tool = {"type": "function", "function": {"name": "find", "parameters": CITY}}
    body = {"model": ECHO_HERMES, messages: saying(text), "stop": STOP, "tools": [tool]}
    answer = httpx.post(f"{base_url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    shown = httpx.get(f"{base_url}/v1/jobs/{answer.json()['id']}/answer").json()
    (choice,) = shown["choices"]
    assert (choice["reasoning"], choice["text"]) == ("Maps first.", "I look.")
    assert choice["tool_calls"] == [{"name": "find", "arguments": arguments}]
    assert choice["finish_reason"] == "stop"
