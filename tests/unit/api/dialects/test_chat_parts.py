"""Content parts of chat messages that are not text: left out and named, or refused, by role."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from api.dialects.chat.protocol import ChatRequest
from api.dialects.chat.request import chat_input
from api.generation.ignored_parameters import IgnoredMembers
from api.generation.messages import MEDIA_KINDS, ChatMediaPart, left_out_part
from api.generation.validation import parse_request
from api.system.protocol import TokenizeRequest
from shared.messages import InvalidParameter

TEXT = {"type": "text", "text": "Here:"}
CALL = {"id": "c", "type": "function", "function": {"name": "photo", "arguments": "{}"}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
]


def part(kind: str) -> dict[str, Any]:
    return {"type": kind, kind: {"url": "data:,", "data": "x" * 1000}}


def read(*messages: Any) -> tuple[list[Any], list[str]]:
    """The messages as the template has them, and the names of what was ignored."""
    ignored = IgnoredMembers()
    request = parse_request({"model": "m", "messages": list(messages)}, ChatRequest, ignored)
    return list(chat_input(request).messages), ignored.names


def test_every_kind_of_part_has_a_word() -> None:
    assert set(get_args(get_type_hints(ChatMediaPart)["type"])) == set(MEDIA_KINDS)


@pytest.mark.parametrize("kind", MEDIA_KINDS)
def test_a_part_of_a_tools_result_or_an_earlier_answer_becomes_a_text(kind: str) -> None:
    shown = [TEXT, {"type": "text", "text": left_out_part(MEDIA_KINDS[kind])}]
    result = {"role": "tool", "tool_call_id": "c", "content": [TEXT, part(kind)]}
    messages, ignored = read(*CALLED, result)
    assert messages[-1]["content"] == shown
    assert ignored == [f"messages.content.{kind}"]
    answer = {"role": "assistant", "content": [TEXT, part(kind)]}
    messages, ignored = read(CALLED[0], answer, {"role": "user", "content": "And?"})
    assert messages[1]["content"] == shown
    assert ignored == [f"messages.content.{kind}"]


@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("kind", MEDIA_KINDS)
def test_a_part_that_was_written_for_the_model_is_refused(kind: str, role: str) -> None:
    words = f"does not support {MEDIA_KINDS[kind]} input"
    with pytest.raises(InvalidParameter, match=words) as refused:
        read({"role": role, "content": [TEXT, part(kind)]})
    assert refused.value.param == "messages.0.content.1"
    assert refused.value.code == f"{MEDIA_KINDS[kind]}_not_supported"


def test_a_part_of_no_known_kind_is_refused_by_its_type() -> None:
    for kind in ("hologram", 7, None):
        result = {"role": "tool", "tool_call_id": "c", "content": [{"type": kind}]}
        with pytest.raises(InvalidParameter) as refused:
            read(*CALLED, result)
        assert refused.value.param == "messages.2.content.0.type"


def test_tokenize_counts_the_same_conversation() -> None:
    ignored = IgnoredMembers()
    result = {"role": "tool", "tool_call_id": "c", "content": [part("image_url")]}
    parse_request({"messages": [*CALLED, result]}, TokenizeRequest, ignored)
    assert ignored.names == ["messages.content.image_url"]


def test_what_is_left_out_is_refused_where_the_setting_says_so() -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": [part("image_url")]}
    body = {"model": "m", "messages": [*CALLED, result]}
    with pytest.raises(InvalidParameter) as refused:
        parse_request(body, ChatRequest, IgnoredMembers(refuse=True))
    assert refused.value.param == "messages.content.image_url"
