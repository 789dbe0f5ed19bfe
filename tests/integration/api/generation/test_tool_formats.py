"""Calls in formats of several families, through the whole service and the SDKs of its clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.integration.api.chat_service import (
    ECHO_GLM,
    ECHO_GPT_OSS,
    ECHO_LLAMA4,
    ECHO_MISTRAL,
    ENFORCED_GPT_OSS,
    module_chat_service,
)
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import redis_url  # noqa: F401
from tests.support.service_fixtures import openai_client
from tests.support.written_calls import WRITTEN

anthropic = lazy_import("anthropic")
jsonschema = lazy_import("jsonschema")

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather.", "parameters": CITY}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
OSLO = '{"city": "Oslo", "days": 2}'
CALL = [("get_weather", OSLO)]
STOP = "|over|"  # in no format's markers
THOUGHT = "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant"
# Model -> what it says: reasoning, text and a call, as its family writes them.
SAID = {
    ECHO_GPT_OSS: f"{THOUGHT}{WRITTEN['gpt-oss'](CALL)}<|call|>",
    ECHO_MISTRAL: f"[THINK]Which city?[/THINK]{WRITTEN['magistral'](CALL)}",
    ECHO_GLM: f"<think>Which city?</think>\n{WRITTEN['glm'](CALL)}",
    ECHO_LLAMA4: WRITTEN["llama4"](CALL),
}


def saying(text: str) -> list[dict[str, Any]]:
    """A conversation that an echoing model answers with `text`, if it stops at STOP."""
    return [
        {"role": "system", "content": text + STOP},
        {"role": "user", "content": "Go on."},
    ]


base_url = module_chat_service(*SAID, ENFORCED_GPT_OSS)
client = openai_client


@pytest.mark.parametrize("model", SAID)
def test_a_streamed_call_is_named_first_and_its_arguments_follow(
    client: OpenAI, model: str
) -> None:
    params: Any = {"model": model, "messages": saying(SAID[model]), "tools": TOOLS, "stop": STOP}
    with client.chat.completions.create(**params, stream=True) as chunks:
        choices = [choice for chunk in chunks for choice in chunk.choices]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.id] == ["get_weather"]
    assert calls[0].id
    assert len(calls) > 2  # the arguments came as they were written
    assert "".join(call.function.arguments or "" for call in calls) == OSLO
    assert "".join(choice.delta.content or "" for choice in choices) == ""
    thoughts = (getattr(choice.delta, "reasoning_content", "") or "" for choice in choices)
    assert "".join(thoughts) == ("" if model == ECHO_LLAMA4 else "Which city?")
    assert choices[-1].finish_reason == "tool_calls"
    whole = client.chat.completions.create(**params).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert [call.function.arguments for call in whole.message.tool_calls or ()] == [OSLO]


@pytest.mark.parametrize("model", SAID)
def test_responses_and_messages_have_the_same_call(
    client: OpenAI, base_url: str, model: str
) -> None:
    system, user = saying(SAID[model])
    answer = client.responses.create(
        model=model,
        instructions=system["content"],
        input=user["content"],
        tools=[{"type": "function", **WEATHER}],
        max_output_tokens=len(SAID[model]),
    )
    called = [item for item in answer.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in called][:1] == CALL
    kinds = [item.type for item in answer.output]
    assert ("reasoning" in kinds) is (model != ECHO_LLAMA4)
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as made:
        message = made.messages.create(
            model=model,
            system=system["content"],
            messages=[{"role": "user", "content": user["content"]}],
            tools=[{"name": "get_weather", "input_schema": CITY}],
            stop_sequences=[STOP],
            max_tokens=400,
        )
    used = [block for block in message.content if block.type == "tool_use"]
    assert [(block.name, block.input) for block in used] == [("get_weather", json.loads(OSLO))]


@pytest.mark.parametrize("model", SAID)
def test_the_next_turn_takes_the_call_and_its_result(client: OpenAI, model: str) -> None:
    params: Any = {"model": model, "tools": TOOLS, "stop": STOP}
    first = client.chat.completions.create(messages=saying(SAID[model]), **params)
    message = first.choices[0].message
    (call,) = message.tool_calls or ()
    second = client.chat.completions.create(
        messages=[
            *saying("It is fine." if model != ECHO_GPT_OSS else FINAL),
            message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": "Sun."},
        ],
        **params,
    )
    assert second.choices[0].message.content == "It is fine."
    assert second.choices[0].finish_reason == "stop"


FINAL = "<|channel|>final<|message|>It is fine."


def test_a_required_call_and_a_structured_answer_keep_to_their_schemas(client: OpenAI) -> None:
    """A model with random weights: what is right is so because a grammar keeps it so. It may begin
    to reason and not find out of it."""
    text = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    kept: list[str] = []
    for members in ({"tools": TOOLS, "tool_choice": "required"}, {"response_format": text}):
        for seed in range(20):
            answer = client.chat.completions.create(
                model=ENFORCED_GPT_OSS,
                messages=[{"role": "user", "content": "Weather?"}],
                max_tokens=100,
                seed=seed,
                **members,  # type: ignore[arg-type]
            )
            choice = answer.choices[0]
            if choice.finish_reason != "length":
                break
        calls = choice.message.tool_calls or ()
        (written,) = [call.function.arguments for call in calls] or [choice.message.content or ""]
        jsonschema.validate(json.loads(written), CITY)
        kept.append(choice.finish_reason)
    assert kept == ["tool_calls", "stop"]


def test_what_a_template_cannot_do_about_thinking_is_named(base_url: str) -> None:
    """Harmony has no switch, and three efforts."""
    asked: Any = {"model": ECHO_GPT_OSS, "max_tokens": 4, "messages": saying("x")[1:]}
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as made:
        for members, names in (
            ({"thinking": {"type": "disabled"}}, "thinking"),
            ({"thinking": {"type": "adaptive"}}, None),
            ({"output_config": {"effort": "max"}}, "output_config.effort"),
            ({"output_config": {"effort": "high"}}, None),
        ):
            answer = made.messages.with_raw_response.create(**asked, extra_body=members)
            assert answer.headers.get("x-penstock-ignored") == names, members
            counted = made.messages.with_raw_response.count_tokens(
                model=ECHO_GPT_OSS, messages=asked["messages"], extra_body=members
            )
            assert counted.headers.get("x-penstock-ignored") == names, members
