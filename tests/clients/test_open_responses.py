"""The compliance cases of Open Responses (openresponses.org), against the demo model.

Each case sends what the suite's own sends. Its validators are written anew: the whole resource with
every member that the specification requires, and the order of a stream's events.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.clients.agent_checks import DEMO

# Members of a ResponseResource, all of them required. With their types; None may stand for each
# in _NULLABLE.
_MEMBERS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "object": str,
    "created_at": int,
    "completed_at": int,
    "status": str,
    "incomplete_details": dict,
    "model": str,
    "previous_response_id": str,
    "instructions": (str, list),
    "output": list,
    "error": dict,
    "tools": list,
    "tool_choice": (str, dict),
    "truncation": str,
    "parallel_tool_calls": bool,
    "text": dict,
    "top_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "top_logprobs": int,
    "temperature": (int, float),
    "reasoning": dict,
    "usage": dict,
    "max_output_tokens": int,
    "max_tool_calls": int,
    "store": bool,
    "background": bool,
    "service_tier": str,
    "metadata": dict,
    "safety_identifier": str,
    "prompt_cache_key": str,
}
_NULLABLE = {
    *("completed_at", "incomplete_details", "previous_response_id", "instructions", "error"),
    *("reasoning", "usage", "max_output_tokens", "max_tool_calls", "safety_identifier"),
    "prompt_cache_key",
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {
            # The bound is not the suite's: the model may say more than an answer has room for.
            "location": {"type": "string", "description": "The city and state", "maxLength": 40}
        },
        "required": ["location"],
    },
}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB"


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def post(url: str, **members: Any) -> httpx.Response:
    body = {"model": DEMO, "max_output_tokens": 48, **members}
    return httpx.post(f"{url}/v1/responses", json=body, timeout=100)


def check_resource(response: dict[str, Any], *statuses: str) -> None:
    """Checks a whole response: members, types, and those of its items."""
    assert not [name for name in _MEMBERS if name not in response]
    for name, kind in _MEMBERS.items():
        value = response[name]
        if value is None:
            assert name in _NULLABLE, name
        else:
            assert isinstance(value, kind), (name, value)
    assert response["object"] == "response"
    assert (response["completed_at"] is not None) == (response["status"] == "completed")
    assert response["status"] in (statuses or ("completed", "incomplete"))
    for item in response["output"]:
        assert item["id"]
        assert item["status"] in ("in_progress", "completed", "incomplete")
        if item["type"] == "message":
            assert item["role"] == "assistant"
            for part in item["content"]:
                assert (part["type"], part["annotations"]) == ("output_text", [])
                assert isinstance(part["text"], str)
    if response["usage"] is not None:
        usage = response["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] >= 0
        assert usage["output_tokens_details"]["reasoning_tokens"] >= 0


def text_of(response: dict[str, Any]) -> str:
    messages = (item for item in response["output"] if item["type"] == "message")
    return "".join(part["text"] for message in messages for part in message["content"])


def test_basic_text_response(demo_url: str) -> None:
    answer = post(demo_url, input=[turn("user", "Say hello in exactly 3 words.")])
    assert answer.status_code == 200, answer.text
    response = answer.json()
    check_resource(response)
    assert text_of(response)


def test_streaming_response(demo_url: str) -> None:
    body = {
        "model": DEMO,
        "max_output_tokens": 48,
        "stream": True,
        "input": [turn("user", "Count from 1 to 5.")],
    }
    named, events = [], []
    with httpx.stream("POST", f"{demo_url}/v1/responses", json=body, timeout=100) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                named.append(line.removeprefix("event: "))
            elif line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line.removeprefix("data: ")))
    kinds = [event["type"] for event in events]
    assert named == kinds, "an event's name is its type"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-1] in ("response.completed", "response.incomplete")
    for event in (events[0], events[1]):
        check_resource(event["response"], "in_progress")
    check_resource(events[-1]["response"])
    deltas = "".join(event.get("delta", "") for event in events)
    assert deltas == text_of(events[-1]["response"]) == events[-4]["text"] != ""


def test_system_prompt(demo_url: str) -> None:
    pirate = "You are a pirate. Always respond in pirate speak."
    answer = post(demo_url, input=[turn("system", pirate), turn("user", "Say hello.")])
    assert answer.status_code == 200, answer.text
    check_resource(answer.json())
    without = post(demo_url, input=[turn("user", "Say hello.")]).json()
    assert answer.json()["usage"]["input_tokens"] > without["usage"]["input_tokens"]
    instructed = post(demo_url, instructions=pirate, input=[turn("user", "Say hello.")]).json()
    check_resource(instructed)
    assert instructed["instructions"] == pirate
    assert instructed["usage"]["input_tokens"] == answer.json()["usage"]["input_tokens"]


def test_tool_calling(demo_url: str) -> None:
    # The demo model is small: it is required to call, where the suite's models choose to.
    members = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200}
    question = turn("user", "What's the weather like in San Francisco?")
    answer = post(demo_url, input=[question], **members)
    assert answer.status_code == 200, answer.text
    response = answer.json()
    check_resource(response)
    call = next(item for item in response["output"] if item["type"] == "function_call")
    assert call["name"] == "get_weather"
    assert call["call_id"]
    assert isinstance(json.loads(call["arguments"])["location"], str)
    (tool,) = response["tools"]
    assert {**WEATHER, "strict": tool["strict"]} == tool
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    given = {name: call[name] for name in ("type", "call_id", "name", "arguments")}
    second = post(demo_url, input=[question, given, result], tools=[WEATHER])
    assert second.status_code == 200, second.text
    check_resource(second.json())


@pytest.mark.parametrize("url", [PIXEL, "https://example.com/cat.png"])
def test_image_input_is_refused_by_name(demo_url: str, url: str) -> None:
    """No model here sees images: the suite's case ends with a 400 that names the part."""
    content = [
        {"type": "input_text", "text": "What do you see in this image? Answer in one sentence."},
        {"type": "input_image", "image_url": url},
    ]
    answer = post(demo_url, input=[turn("user", content)])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].startswith("input.0.content.1")
    assert error["message"]


def test_multi_turn_conversation(demo_url: str) -> None:
    turns = [
        turn("user", "My name is Alice."),
        turn("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
        turn("user", "What is my name?"),
    ]
    answer = post(demo_url, input=turns)
    assert answer.status_code == 200, answer.text
    check_resource(answer.json())
    assert text_of(answer.json())
    # The same by the earlier response's id.
    first = post(demo_url, input=[turns[0]]).json()
    second = post(demo_url, input=[turns[2]], previous_response_id=first["id"]).json()
    check_resource(second)
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
