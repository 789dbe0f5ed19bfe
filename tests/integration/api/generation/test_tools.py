"""Tools and reasoning through the whole service, in the exact shapes that clients rely on."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.integration.api.chat_service import (
    ECHO_HERMES,
    ECHO_LLAMA3,
    ENFORCED,
    STOP,
    hermes_call,
    module_chat_service,
    saying,
)
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import redis_url  # noqa: F401
from tests.support.service_fixtures import openai_client
from tests.support.sse_readers import payloads

jsonschema = lazy_import("jsonschema")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "now"}},
]
OSLO = '{"city": "Oslo"}'


class GetWeather(BaseModel):
    """The arguments of a tool."""

    city: Literal["Oslo", "Rome"]


USER = {"role": "user", "content": "How is the weather in Oslo?"}


base_url = module_chat_service(ECHO_HERMES, ECHO_LLAMA3, ENFORCED)
client = openai_client


def post(base_url: str, text: str, **members: Any) -> dict[str, Any]:
    """A whole answer of the model that says `text`."""
    body = {"model": ECHO_HERMES, "messages": saying(text), "stop": STOP, **members}
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(base_url: str, text: str, **members: Any) -> list[dict[str, Any]]:
    body = {"model": ECHO_HERMES, "messages": saying(text), "stop": STOP, **members}
    url = f"{base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        text = answer.read()
    assert text.endswith(b"data: [DONE]\n\n")
    return payloads(text)


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def refused(base_url: str, **members: Any) -> tuple[str, str | None]:
    """(param, code) of a 400."""
    body = {"model": ECHO_HERMES, "messages": [USER], "max_tokens": 1, **members}
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["code"]


def test_a_whole_answer_with_calls_has_no_content(base_url: str) -> None:
    text = f"{hermes_call('get_weather', OSLO)}\n{hermes_call('now', '{}')}"
    (choice,) = post(base_url, text, tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "get_weather", "arguments": OSLO}},
        {"type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert "reasoning_content" not in message


@pytest.mark.promise("Runtime: stop strings with hold-back, logprobs, several choices, tool calls")
def test_a_stream_names_each_call_once_and_then_only_adds_arguments(base_url: str) -> None:
    text = f"I look.\n{hermes_call('get_weather', OSLO)}\n{hermes_call('now', '{}')}"
    chunks = stream(base_url, text, tools=TOOLS)
    output = deltas(chunks)
    assert output[0] == {"role": "assistant", "content": ""}
    assert output[-1] == {}
    content = "".join(delta["content"] for delta in output[1:] if "content" in delta)
    assert content == "I look."
    calls = [call for delta in output for call in delta.get("tool_calls", [])]
    begun: dict[int, str] = {}
    for call in calls:
        if call["index"] not in begun:
            assert call.keys() == {"index", "id", "type", "function"}
            assert call["type"] == "function"
            assert call["function"].keys() == {"name", "arguments"}
            begun[call["index"]] = call["function"]["arguments"]
        else:
            assert call.keys() == {"index", "function"}
            assert call["function"].keys() == {"arguments"}
            assert call["function"]["arguments"]
            begun[call["index"]] += call["function"]["arguments"]
    assert list(begun.items()) == [(0, OSLO), (1, "{}")]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "tool_calls"
    ]


def test_each_of_several_choices_makes_its_own_calls(base_url: str) -> None:
    text = f"<think>\nHm.\n</think>\n{hermes_call('now', '{}')}"
    whole = post(base_url, text, tools=TOOLS, n=3)
    calls = [choice["message"]["tool_calls"][0] for choice in whole["choices"]]
    assert len({call["id"] for call in calls}) == 3
    assert {call["function"]["name"] for call in calls} == {"now"}
    details = whole["usage"]["completion_tokens_details"]
    alone = post(base_url, text, tools=TOOLS)["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 3 * alone["reasoning_tokens"]
    chunks = stream(base_url, text, tools=TOOLS, n=3)
    ends = [
        (choice["index"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(ends) == [(index, "tool_calls") for index in range(3)]


def test_what_is_no_call_of_these_tools_is_text(base_url: str) -> None:
    for text in (
        hermes_call("rm", "{}"),
        "<tool_call>\n{broken}\n</tool_call>",
        "a <tool_call> b",
    ):
        (choice,) = post(base_url, text, tools=TOOLS)["choices"]
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
        streamed = deltas(stream(base_url, text, tools=TOOLS))
        assert "".join(delta.get("content", "") for delta in streamed) == text


def test_without_tools_a_call_is_text(base_url: str) -> None:
    call = hermes_call("now", "{}")
    for members in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = post(base_url, call, **members)
        assert answer["choices"][0]["message"]["content"] == call
    shown = post(base_url, "x", tools=TOOLS)["usage"]["prompt_tokens"]
    hidden = post(base_url, "x", tools=TOOLS, tool_choice="none")["usage"]["prompt_tokens"]
    assert hidden < shown  # "none": the model is not told of them


def test_a_call_that_is_cut_off_ends_by_length(base_url: str) -> None:
    call = hermes_call("get_weather", OSLO)
    whole = post(base_url, call, tools=TOOLS, return_token_ids=True)["choices"][0]["token_ids"]
    answer = post(base_url, call, tools=TOOLS, max_tokens=len(whole) - 12)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    (made,) = choice["message"]["tool_calls"]
    assert OSLO.startswith(made["function"]["arguments"])


def test_reasoning_is_apart_and_counted(base_url: str) -> None:
    text = "<think>\nThe keeper counts.\n</think>\n\nSixty."
    whole = post(base_url, text, return_token_ids=True, logprobs=True)
    (choice,) = whole["choices"]
    assert choice["message"]["reasoning_content"] == "The keeper counts."
    assert choice["message"]["content"] == "Sixty."
    assert choice["finish_reason"] == "stop"
    close = tokens_of(base_url, "</think>")[0]
    reasoning_tokens = choice["token_ids"].index(close) + 1
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == reasoning_tokens
    assert reasoning_tokens < whole["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "Sixty."

    options = {"stream_options": {"include_usage": True}, "logprobs": True}
    chunks = stream(base_url, text, **options)
    assert chunks[-1]["usage"]["completion_tokens_details"] == details
    streamed = deltas(chunks)
    assert "".join(d.get("reasoning_content", "") for d in streamed) == "The keeper counts."
    assert "".join(d.get("content", "") for d in streamed) == "Sixty."
    entries = [
        entry
        for chunk in chunks
        for one in chunk["choices"]
        for entry in (one["logprobs"] or {"content": []})["content"]
    ]
    assert entries == choice["logprobs"]["content"]


def test_a_prompt_may_open_or_close_the_reasoning(base_url: str) -> None:
    begun = {"chat_template_kwargs": {"begin_thinking": True}}
    message = post(base_url, "so\n</think>\nyes", **begun)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "yes")
    never_closed = post(base_url, "on and on", **begun)
    message = never_closed["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("on and on", "")
    details = never_closed["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(tokens_of(base_url, "on and on"))
    message = post(base_url, "yes", reasoning_effort="none")["choices"][0]["message"]
    assert message["content"] == "yes"


def test_a_budget_bounds_the_tokens_of_reasoning(base_url: str) -> None:
    """The computing model is a random one: it would think to the end of its tokens."""
    params = {
        "model": ENFORCED,
        "messages": [USER],
        "max_tokens": 60,
        "temperature": 0,
        "chat_template_kwargs": {"begin_thinking": True},
        "thinking_token_budget": 9,
        "n": 2,
    }
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=params, timeout=60).json()
    for choice in answer["choices"]:
        assert choice["message"]["reasoning_content"]
        assert choice["message"]["content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 2 * (9 + 1)


def test_the_last_message_is_continued_on_request(base_url: str) -> None:
    begun = {"role": "assistant", "content": "It is ("}
    params = {"model": ECHO_HERMES, "messages": [USER, begun], "max_tokens": 100}
    continued = {**params, "continue_final_message": True, "add_generation_prompt": False}
    path = f"{base_url}/v1/chat/completions"
    answer = httpx.post(path, json=continued, timeout=60).json()
    # The echoing model says its prompt again and again: behind what was begun comes its start.
    assert "assistant\nIt is (user\n" in answer["choices"][0]["message"]["content"]
    closed = httpx.post(path, json={**params, "add_generation_prompt": False}, timeout=60).json()
    assert closed["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"] + 2  # its end
    both = httpx.post(path, json={**params, "continue_final_message": True}, timeout=60)
    assert both.status_code == 400
    assert both.json()["error"]["param"] == "continue_final_message"
    user_last = httpx.post(path, json={**continued, "messages": [USER]}, timeout=60)
    assert (user_last.status_code, user_last.json()["error"]["param"]) == (400, "messages")


def test_reasoning_and_calls_in_one_turn(base_url: str) -> None:
    text = f"<think>\nI should look.\n</think>\n\n{hermes_call('now', '{}')}"
    (choice,) = post(base_url, text, tools=TOOLS)["choices"]
    assert choice["message"]["reasoning_content"] == "I should look."
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_llamas_format_is_read_and_written_too(base_url: str) -> None:
    text = f'{{"name": "get_weather", "parameters": {OSLO}}}'
    (choice,) = post(base_url, text, model=ECHO_LLAMA3, tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": OSLO,
    }
    (choice,) = post(base_url, '{"answer": 42}', model=ECHO_LLAMA3, tools=TOOLS)["choices"]
    assert choice["message"]["content"] == '{"answer": 42}'


def test_results_of_calls_go_back_to_the_model(base_url: str, client: OpenAI) -> None:
    """The message that the SDK made of an answer is sent as it is."""
    thought = f"<think>\nHm.\n</think>\n\n{hermes_call('get_weather', OSLO)}"
    first = client.chat.completions.create(
        model=ECHO_HERMES, messages=saying(thought), tools=TOOLS, stop=STOP
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    result: Any = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": [{"type": "text", "text": "Sun, 3 °C"}],
    }
    second = client.chat.completions.create(
        model=ECHO_HERMES,
        messages=[*saying("It is sunny.", USER), message, result],
        tools=TOOLS,
        stop=STOP,
        extra_body={"return_token_ids": True},
    )
    assert second.choices[0].message.content == "It is sunny."
    prompt = text_of(base_url, (second.model_extra or {})["prompt_token_ids"])
    assert "<think>\nHm.\n</think>" in prompt
    assert hermes_call("get_weather", OSLO) in prompt
    assert "<tool_response>\nSun, 3 °C\n</tool_response>" in prompt


def test_what_must_be_called_is_called_with_valid_arguments(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }
    num_ended = 0
    for seed in range(6):
        for choice in ("required", named, allowed):
            answer = client.chat.completions.create(
                model=ENFORCED,
                messages=[USER],  # type: ignore[list-item]
                tools=TOOLS,
                tool_choice=choice,  # type: ignore[arg-type]
                parallel_tool_calls=seed % 2 == 0,
                max_tokens=200,
                seed=seed,
                temperature=0.7,
                reasoning_effort="none",
            ).choices[0]
            if answer.finish_reason == "length":
                continue
            num_ended += 1
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content is None
            calls = answer.message.tool_calls or []
            assert calls
            assert len(calls) == 1 or seed % 2 == 0
            for call in calls:
                assert call.type == "function"
                arguments = json.loads(call.function.arguments)
                if call.function.name == "get_weather":
                    jsonschema.validate(arguments, CITY)
                else:
                    assert (call.function.name, choice) == ("now", "required")
                    assert arguments == {}
    assert num_ended


def test_beside_a_structured_answer_calls_stay_possible(client: OpenAI) -> None:
    num_ended = 0
    for seed in range(6):
        choice = client.chat.completions.create(
            model=ENFORCED,
            messages=[USER],  # type: ignore[list-item]
            tools=TOOLS[:1],
            parallel_tool_calls=False,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": CITY},
            },
            max_tokens=300,
            seed=seed,
            reasoning_effort="none",
        ).choices[0]
        if choice.finish_reason == "length":
            continue
        num_ended += 1
        if choice.finish_reason == "stop":
            output = choice.message.content
        else:
            assert choice.message.content is None
            (call,) = choice.message.tool_calls or []
            output = call.function.arguments  # type: ignore[union-attr]
        jsonschema.validate(json.loads(output or ""), CITY)
    assert num_ended


def test_times_are_reported_on_request(base_url: str) -> None:
    names = {
        "time_to_first_token_ms",
        "generation_time_ms",
        "queue_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
    }
    whole = post(base_url, "some words to say", return_metrics=True)
    assert whole["metrics"].keys() == names
    chunks = stream(base_url, "some words to say", return_metrics=True)
    assert chunks[-1]["metrics"].keys() == names
    assert all("metrics" not in chunk for chunk in chunks[:-1])
    usage = stream(base_url, "words", return_metrics=True, stream_options={"include_usage": True})[
        -1
    ]
    assert usage["choices"] == []
    assert usage["metrics"]["generation_time_ms"] >= 0
    assert "metrics" not in post(base_url, "words")


def test_a_tier_is_echoed_and_a_priority_taken(base_url: str) -> None:
    assert post(base_url, "x", service_tier="auto")["service_tier"] == "default"
    assert post(base_url, "x", service_tier="flex")["service_tier"] == "flex"
    assert "service_tier" not in post(base_url, "x", priority=3)
    assert all(
        c["service_tier"] == "default" for c in stream(base_url, "x", service_tier="default")
    )


def test_labels_are_taken_and_what_is_unknown_is_refused(base_url: str) -> None:
    post(base_url, "x", user="u", metadata={"a": "b"}, store=False, safety_identifier="s")
    assert refused(base_url, no_such_member=1) == ("no_such_member", "unsupported_parameter")


def test_the_sdks_stream_helper_accumulates_calls(client: OpenAI) -> None:
    text = f"I look.\n{hermes_call('get_weather', OSLO)}\n{hermes_call('now', '{}')}"
    with client.chat.completions.stream(
        model=ECHO_HERMES, messages=saying(text), tools=TOOLS, stop=STOP
    ) as helped:
        events = list(helped)
        final = helped.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == [
        ("get_weather", OSLO),
        ("now", "{}"),
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.content == "I look."
    calls = final.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ["get_weather", "now"]


def test_a_message_of_the_parsing_helpers_goes_back_as_it_is(client: OpenAI) -> None:
    """A strict tool's arguments are parsed into its model, which the SDK adds to the message."""
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    params: Any = {
        "model": ENFORCED,
        "messages": [USER],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "temperature": 0.7,
        "reasoning_effort": "none",
    }
    seed, parsed = ended_by_itself(client, params)
    with client.chat.completions.stream(**params, seed=seed) as helped:
        streamed = helped.get_final_completion().choices[0].message
    for message in (parsed, streamed):
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert isinstance(call.function.parsed_arguments, GetWeather)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        answer = client.chat.completions.create(
            model=ECHO_HERMES, messages=[*saying("Fine.", USER), message, result], stop=STOP
        )
        assert answer.choices[0].message.content == "Fine."


def ended_by_itself(client: OpenAI, params: Any) -> tuple[int, Any]:
    """A seed with which the random model ends before its limit, and what it says then."""
    for seed in range(20):
        try:
            answer = client.chat.completions.parse(**params, seed=seed)
        except openai.LengthFinishReasonError:
            continue
        return seed, answer.choices[0].message
    raise AssertionError("none of twenty answers ended by itself")


def tokens_of(base_url: str, text: str) -> list[int]:
    body = {"model": ECHO_HERMES, "prompt": text}
    return list(httpx.post(f"{base_url}/tokenize", json=body).json()["tokens"])


def text_of(base_url: str, token_ids: list[int]) -> str:
    body = {"model": ECHO_HERMES, "tokens": token_ids}
    return str(httpx.post(f"{base_url}/detokenize", json=body).json()["prompt"])
