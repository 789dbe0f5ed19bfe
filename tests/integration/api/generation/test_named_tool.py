"""A function that is requested by name is called once, in each dialect; its model would go on.

The model computes at random, and `min_tokens` keeps it from ending while a grammar leaves it
anything else to say: where several calls are allowed, several come.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.integration.api.chat_service import ENFORCED, module_chat_service
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import redis_url  # noqa: F401
from tests.support.service_fixtures import openai_client

anthropic = lazy_import("anthropic")

GATE = {
    "type": "object",
    "properties": {"gate": {"enum": ["north", "south"]}},
    "required": ["gate"],
    "additionalProperties": False,
}
FUNCTIONS: list[Any] = [{"name": "depth", "parameters": GATE}, {"name": "now"}]
TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]
USER: Any = {"role": "user", "content": "How deep is it?"}
NAMED: Any = {"type": "function", "function": {"name": "depth"}}
GOES_ON = {"min_tokens": 200}
SEEDS = range(3)


base_url = module_chat_service(ENFORCED)
client = openai_client


def send(client: OpenAI, choice: Any, seed: int, **members: Any) -> Any:
    return client.chat.completions.create(
        model=ENFORCED,
        messages=[USER],
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=400,
        seed=seed,
        reasoning_effort="none",
        extra_body=GOES_ON,
        **members,
    )


@pytest.mark.promise(
    "Clients: a named function is called exactly once, a required one at least once, in every "
    "dialect"
)
@pytest.mark.parametrize("members", [{}, {"parallel_tool_calls": True}], ids=["left-out", "true"])
def test_chat_calls_a_named_function_once(client: OpenAI, members: dict[str, Any]) -> None:
    for seed in SEEDS:
        (choice,) = send(client, NAMED, seed, **members).choices
        (call,) = choice.message.tool_calls
        assert call.function.name == "depth"
        assert json.loads(call.function.arguments)["gate"] in ("north", "south")
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


def test_a_stream_has_the_same_one_call(client: OpenAI) -> None:
    whole = send(client, NAMED, 1).choices[0]
    chunks = list(send(client, NAMED, 1, stream=True))
    calls = [
        call
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert {call.index for call in calls} == {0}
    output = "".join(call.function.arguments for call in calls)
    assert output == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_a_required_call_may_be_several_unless_that_is_excluded(client: OpenAI) -> None:
    for seed in SEEDS:
        several = send(client, "required", seed).choices[0].message.tool_calls
        assert len(several) > 1
        one = send(client, "required", seed, parallel_tool_calls=False).choices[0]
        assert len(one.message.tool_calls) == 1
        assert one.finish_reason == "tool_calls"


def test_each_choice_calls_it_once(client: OpenAI) -> None:
    answer = send(client, NAMED, 5, n=3)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1, 1, 1]


def test_a_response_calls_a_named_function_once(client: OpenAI) -> None:
    params: dict[str, Any] = {
        "model": ENFORCED,
        "input": "How deep is it?",
        "tools": [{"type": "function", **function} for function in FUNCTIONS],
        "max_output_tokens": 400,
        "reasoning": {"effort": "none"},
        "extra_body": {**GOES_ON, "seed": 2},
    }
    named = {"type": "function", "name": "depth"}
    once = client.responses.create(**params, tool_choice=named, parallel_tool_calls=True)
    assert [(item.type, once.status) for item in once.output] == [("function_call", "completed")]
    several = client.responses.create(**params, tool_choice="required")
    assert [item.type for item in several.output[:2]] == ["function_call"] * 2
    one = client.responses.create(**params, tool_choice="required", parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["function_call"]


def test_a_message_calls_a_named_tool_once(base_url: str) -> None:
    """This dialect has no member that holds an end back, so it is asked several times."""
    choices: list[Any] = [
        {"type": "tool", "name": "depth"},
        {"type": "any", "disable_parallel_tool_use": True},
    ]
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as made:
        for choice in choices:
            for _ in SEEDS:
                message = made.messages.create(
                    model=ENFORCED,
                    max_tokens=400,
                    messages=[USER],
                    tools=[{"name": "depth", "input_schema": GATE}],
                    tool_choice=choice,
                    thinking={"type": "disabled"},
                )
                (call,) = message.content
                assert (call.type, call.name) == ("tool_use", "depth")
                assert call.input["gate"] in ("north", "south")
                assert message.stop_reason == "tool_use"


def test_by_hand_as_instructor_sends_it(base_url: str) -> None:
    """The members that `instructor` sends in its default mode, and what it insists on."""
    body = {
        "model": ENFORCED,
        "messages": [USER],
        "tools": [
            {
                "type": "function",
                "function": {**FUNCTIONS[0], "description": "Correctly extracted `depth`."},
            }
        ],
        "tool_choice": NAMED,
        "max_tokens": 400,
        "chat_template_kwargs": {"enable_thinking": False},
        "min_tokens": 100,
    }
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60).json()
    message = answer["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["depth"]
