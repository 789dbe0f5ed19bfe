"""A conversation's parts are bounded in every dialect, and joining turns is linear in them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from api.dialects.chat.protocol import ChatRequest
from api.dialects.messages.protocol import MessageRequest
from api.dialects.messages.request import chat_input
from api.dialects.responses.protocol import ResponseRequest
from api.generation.messages import MAX_PARTS
from api.generation.protocol import MAX_ENTRIES
from api.generation.validation import parse_request
from shared.messages import InvalidParameter


def message_request(messages: list[dict[str, Any]], **members: Any) -> MessageRequest:
    body = {"model": "m", "max_tokens": 1, "messages": messages, **members}
    return parse_request(body, MessageRequest)


def chat_request(messages: list[dict[str, Any]]) -> ChatRequest:
    return parse_request({"model": "m", "messages": messages}, ChatRequest)


def text_blocks(num: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": "a"}] * num


def from_messages(num: int) -> object:
    return chat_input(message_request([{"role": "user", "content": text_blocks(num)}]))


def from_tool_results(num: int) -> object:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": text_blocks(num - 2)}
    return chat_input(
        message_request(
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
        )
    )


def from_chat(num: int) -> object:
    return chat_request([{"role": "user", "content": text_blocks(num)}])


def from_chat_calls(num: int) -> object:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks = [
        {"role": "assistant", "tool_calls": [{**call, "id": f"{n}.{k}"} for k in range(100)]}
        for n in range(num // 100)
    ]
    return chat_request([*asks, {"role": "user", "content": text_blocks(num % 100)}])


def from_responses(num: int) -> object:
    parts = [{"type": "input_text", "text": "a"}] * num
    body = {"model": "m", "input": [{"role": "user", "content": parts}]}
    return parse_request(body, ResponseRequest)


@pytest.mark.parametrize(
    ("read", "param"),
    [
        (from_messages, "messages"),
        (from_tool_results, "messages"),
        (from_chat, "messages"),
        (from_chat_calls, "messages"),
        (from_responses, "input"),
    ],
)
def test_more_parts_than_the_bound_are_refused_by_name(
    read: Callable[[int], object], param: str
) -> None:
    if read is not from_chat_calls:
        read(MAX_PARTS)
    with pytest.raises(InvalidParameter, match="content parts") as refused:
        read(MAX_PARTS + 1)
    assert refused.value.param == param


MANY = {f"x{index}": 1 for index in range(MAX_ENTRIES + 1)}
PART = {"type": "text", "text": "a", **MANY}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}", **MANY}}


@pytest.mark.parametrize(
    ("read", "messages"),
    [
        (chat_request, [{"role": "user", "content": "a", **MANY}]),
        (chat_request, [{"role": "user", "content": [PART]}]),
        (chat_request, [{"role": "assistant", "tool_calls": [CALL]}]),
        (message_request, [{"role": "user", "content": "a", **MANY}]),
        (message_request, [{"role": "user", "content": [PART]}]),
    ],
)
def test_the_members_of_one_object_are_bounded(
    read: Callable[[list[dict[str, Any]]], object], messages: list[dict[str, Any]]
) -> None:
    """Errors of as many unknown members would hold the loop for a tenth of a second."""
    with pytest.raises(InvalidParameter, match="members") as refused:
        read(messages)
    assert refused.value.param == "messages"


def test_the_blocks_of_a_system_prompt_are_bounded() -> None:
    with pytest.raises(InvalidParameter, match="content parts") as refused:
        message_request([{"role": "user", "content": "hi"}], system=text_blocks(MAX_PARTS + 1))
    assert refused.value.param == "system"


def test_messages_blocks_are_counted_before_they_are_parsed() -> None:
    blocks: list[Any] = [{"type": "no such type"}, *text_blocks(MAX_PARTS)]
    with pytest.raises(InvalidParameter, match="content parts"):
        message_request([{"role": "user", "content": blocks}])


def blocks_of_one_message(num: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text_blocks(num)}]


def messages_of_one_turn(num: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}] * num


def thoughts_of_one_turn(num: int) -> list[dict[str, Any]]:
    thought = {"type": "thinking", "thinking": "a" * 400}
    thinks = {"role": "assistant", "content": [thought]}
    return [*[thinks] * (num - 1), {"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "make", [blocks_of_one_message, messages_of_one_turn, thoughts_of_one_turn]
)
def test_joining_a_turn_is_linear_in_its_blocks(
    make: Callable[[int], list[dict[str, Any]]],
) -> None:
    """Eight times the blocks take eight times the work; quadratic work would take 64 times."""

    def seconds(num: int) -> float:
        request, best = message_request(make(num)), float("inf")
        gc.disable()  # its passes grow with what the whole test run keeps
        try:
            for _ in range(5):
                begin = time.thread_time()
                chat_input(request)
                best = min(best, time.thread_time() - begin)
        finally:
            gc.enable()
        return best

    assert seconds(8000) < 32 * seconds(1000)
