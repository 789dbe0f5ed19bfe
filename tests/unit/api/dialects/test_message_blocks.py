"""What agents send in the Messages dialect: served as text, left out and named, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from api.dialects.messages.blocks import DroppedBlock
from api.dialects.messages.protocol import CountTokensRequest, MessageRequest
from api.dialects.messages.request import chat_input
from api.generation.ignored_parameters import IgnoredMembers
from api.generation.messages import left_out_part
from api.generation.prompt import ChatInput
from api.generation.validation import parse_request
from shared.messages import InvalidParameter

PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQK"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(*content: Any, **members: Any) -> list[dict[str, Any]]:
    """A call and the message with its result."""
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": list(content), **members}
    return [user(text("hi")), {"role": "assistant", "content": [CALL]}, user(block)]


def served(*messages: Any, **members: Any) -> tuple[ChatInput, list[str]]:
    """The prompt's parts, and the names of what was ignored."""
    ignored = IgnoredMembers()
    body = {"model": "m", "max_tokens": 9, "messages": list(messages), **members}
    return chat_input(parse_request(body, MessageRequest, ignored)), ignored.names


def texts(message: Any) -> list[str]:
    return [part["text"] for part in message["content"]]


@pytest.mark.parametrize(
    ("block", "shown", "named"),
    [
        (text("deep"), "deep", []),
        (PICTURE, left_out_part("image"), ["messages.content.image"]),
        (
            {"type": "document", "source": PDF},
            left_out_part("document"),
            ["messages.content.document"],
        ),
        (
            {"type": "document", "source": {"type": "url", "url": "https://x.test/a.pdf"}},
            left_out_part("document"),
            ["messages.content.document"],
        ),
        (
            {
                "type": "document",
                "title": "Gates",
                "context": "of 1901",
                "citations": {"enabled": True},
                "source": {"type": "text", "media_type": "text/plain", "data": "Seven gates."},
            },
            "Gates\nof 1901\nSeven gates.",
            ["messages.content.citations"],
        ),
        (
            {
                "type": "document",
                "source": {"type": "content", "content": [text("Seven"), PICTURE, text("gates.")]},
            },
            f"Seven\n{left_out_part('image')}\ngates.",
            ["messages.content.image"],
        ),
        (
            {"type": "document", "source": {"type": "content", "content": "Seven gates."}},
            "Seven gates.",
            [],
        ),
        (
            {
                "type": "search_result",
                "title": "Gates",
                "source": "https://x.test",
                "content": [text("one"), text("two")],
                "citations": {"enabled": False},
            },
            "Gates\nhttps://x.test\none\ntwo",
            [],
        ),
        (
            {"type": "tool_reference", "tool_name": "mcp__x__y"},
            "The tool 'mcp__x__y' is available.",
            [],
        ),
        (
            {"type": "browser_state", "tabs": []},
            left_out_part("browser state"),
            ["messages.content.browser_state"],
        ),
    ],
)
def test_a_result_of_a_tool_is_text(block: dict[str, Any], shown: str, named: list[str]) -> None:
    ask, ignored = served(*result(block))
    assert texts(ask.messages[-1]) == [shown]
    assert ignored == named


def test_a_failed_result_with_a_picture_says_that_it_failed() -> None:
    ask, _ = served(*result(PICTURE, text("no"), is_error=True))
    assert texts(ask.messages[-1]) == [f"Error: {left_out_part('image')}", "no"]
    ask, _ = served(*result(is_error=True))
    assert ask.messages[-1]["content"] == "Error: "


@pytest.mark.parametrize(
    ("block", "code", "words"),
    [
        (PICTURE, "image_not_supported", "does not support image input"),
        ({"type": "document", "source": PDF}, "pdf_not_supported", "does not support PDF input"),
    ],
)
def test_the_users_own_picture_is_refused_in_words_that_agents_look_for(
    block: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(InvalidParameter, match=words) as refused:
        served(user(text("Look:"), block))
    assert (refused.value.param, refused.value.code) == ("messages.0.content.1", code)


def test_a_picture_in_a_users_document_is_refused_where_it_is() -> None:
    document = {"type": "document", "source": {"type": "content", "content": [PICTURE]}}
    with pytest.raises(InvalidParameter) as refused:
        served(user(document))
    assert refused.value.param == "messages.0.content.0.source.content.0"


def test_what_stands_beside_a_tools_result_is_the_tools() -> None:
    messages = result(text("as follows"))
    messages[-1]["content"] += [PICTURE, text("Go on.")]
    ask, ignored = served(*messages)
    assert [message["role"] for message in ask.messages[-2:]] == ["tool", "user"]
    assert texts(ask.messages[-1]) == [left_out_part("image"), "Go on."]
    assert ignored == ["messages.content.image"]


@pytest.mark.parametrize("kind", DroppedBlock.model_json_schema()["properties"]["type"]["enum"])
def test_an_item_of_a_hosted_tool_is_dropped_and_named(kind: str) -> None:
    item = {"type": kind, "id": "srvtoolu_1", "name": "web_search", "input": {}, "content": []}
    ask, ignored = served(
        user(text("hi")),
        {"role": "assistant", "content": [item, {**text("Found."), "citations": [{"x": 1}]}]},
        {"role": "assistant", "content": [item]},
        user(item, text("And?")),
    )
    assert [texts(message) for message in ask.messages] == [["hi"], ["Found."], ["And?"]]
    assert ignored == [f"messages.content.{kind}", "messages.content.citations"]


def test_a_picture_of_an_earlier_answer_is_left_out() -> None:
    ask, ignored = served(
        user(text("Draw.")),
        {"role": "assistant", "content": [text("So:"), PICTURE]},
        user(text("?")),
    )
    assert texts(ask.messages[1]) == ["So:", left_out_part("image")]
    assert ignored == ["messages.content.image"]


def test_a_conversation_of_dropped_blocks_alone_is_refused() -> None:
    with pytest.raises(InvalidParameter) as refused:
        served(user({"type": "container_upload", "file_id": "f"}))
    assert refused.value.param == "messages"


def test_a_summary_replaces_everything_before_it() -> None:
    summary = {"type": "compaction", "content": "We dug.", "signature": "s"}
    ask, ignored = served(
        user(text("Dig.")),
        {"role": "assistant", "content": [text("early"), summary, text("Dug."), CALL]},
        user({"type": "tool_result", "tool_use_id": "toolu_1", "content": "7"}),
        system="Be brief.",
    )
    assert [message["role"] for message in ask.messages] == ["system", "user", "assistant", "tool"]
    assert texts(ask.messages[1]) == ["We dug."]
    assert texts(ask.messages[2]) == ["Dug."]
    assert ignored == []
    failed = {"type": "compaction", "content": None}
    ask, _ = served(user(text("Dig.")), {"role": "assistant", "content": [failed, text("Dug.")]})
    assert [texts(message) for message in ask.messages] == [["Dig."], ["Dug."]]


# --- late system messages ---


def test_a_late_system_message_has_text_and_an_effort() -> None:
    late = {"role": "system", "content": [text("Hurry.")], "output_config": {"effort": "low"}}
    ask, _ = served(user(text("a")), late, output_config={"effort": "max"})
    assert [message["role"] for message in ask.messages] == ["user", "system"]
    assert ask.reasoning_effort == "low"
    ask, _ = served({"role": "system", "output_config": {"effort": "high"}}, user(text("a")))
    assert [message["role"] for message in ask.messages] == ["user"]
    assert ask.reasoning_effort == "high"
    with pytest.raises(InvalidParameter) as refused:
        served(user(text("a")), {"role": "system", "content": []})
    assert refused.value.param == "messages.1.content"


def test_a_system_message_for_one_turn_is_gone_in_the_next() -> None:
    late = {"role": "system", "content": "Hurry.", "clear_at": "next_user_message"}
    ask, _ = served(user(text("a")), late)
    assert [message["content"] for message in ask.messages[1:]] == ["Hurry."]
    ask, _ = served(user(text("a")), late, {"role": "assistant", "content": "b"}, user(text("c")))
    assert [message["role"] for message in ask.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize("effort", ["low", "xhigh", "ultracode", "some"])
def test_an_effort_is_passed_as_it_is_written(effort: str) -> None:
    ask, _ = served(user(text("a")), output_config={"effort": effort})
    assert ask.reasoning_effort == effort


def test_an_earlier_name_of_the_format_is_known() -> None:
    schema = {"type": "object", "properties": {}}
    ask, _ = served(user(text("a")), output_format={"type": "json_schema", "schema": schema})
    assert ask.output is not None
    assert ask.output.param == "output_format.schema"


# --- the members that Claude Code adds to each request ---


def test_what_claude_code_adds_is_ignored_and_named() -> None:
    marked = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    added: dict[str, Any] = {
        "metadata": {"user_id": '{"device_id":"' + "5" * 900 + '","session_id":"9"}'},
        "thinking": {"type": "adaptive", "display": "omitted", "block_binding": {}},
        "context_management": {
            "edits": [
                {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
                {"type": "clear_tool_uses_20250919", "exclude_tools": ["Read"]},
            ]
        },
        "diagnostics": {"previous_message_id": None},
        "betas": ["effort-2025-11-24"],
        "mcp_servers": [{"type": "url", "name": "x", "url": "https://x.test"}],
        "container": {"id": None, "skills": []},
        "inference_geo": "us",
        "speed": "fast",
        "fallbacks": [{"model": "other"}],
        "system": [{**text("Be brief."), "cache_control": marked}],
    }
    ask, ignored = served(user({**text("a"), "cache_control": marked}), **added)
    assert set(ignored) == {
        *(set(added) - {"system", "thinking"}),
        "thinking.display",
        "thinking.block_binding",
    }
    assert ask.chat_template_kwargs == {"enable_thinking": True}


def test_tokens_are_counted_of_all_that_is_served() -> None:
    messages = [*result(PICTURE), {"role": "system", "content": "late"}]
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    counted = parse_request(
        {"model": "m", "messages": messages, "tools": tools}, CountTokensRequest
    )
    ask, _ = served(*messages, tools=tools)
    assert chat_input(counted) == ask


def test_what_is_left_out_is_refused_where_the_setting_says_so() -> None:
    body = {"model": "m", "max_tokens": 9, "messages": result(PICTURE)}
    with pytest.raises(InvalidParameter) as refused:
        parse_request(body, MessageRequest, IgnoredMembers(refuse=True))
    assert (refused.value.param, refused.value.code) == (
        "messages.content.image",
        "unsupported_parameter",
    )


def test_blocks_in_blocks_are_counted() -> None:
    document = {"type": "document", "source": {"type": "content", "content": [text("a")] * 10_001}}
    for messages in ([user(document)], result(document)):
        with pytest.raises(InvalidParameter, match="at most 10000 content parts"):
            served(*messages)
