"""What Claude Code sends, by HTTP and by the SDKs, to real workers: served, or left out and named.

The members, blocks and tools are those of its requests; the texts are not.
"""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.integration.api.chat_service import (
    ECHO_HERMES,
    STOP,
    anthropic_client,
    hermes_call,
    module_chat_service,
)
from tests.support.claude_code import BETAS, PICTURE, TURN
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import redis_url  # noqa: F401

anthropic = lazy_import("anthropic")

HEADER = "x-penstock-ignored"
OUTPUT = f"{hermes_call('mcp__x__photo', '{}')}{STOP}"
COUNTED: dict[str, Any] = {
    **TURN,
    "model": ECHO_HERMES,
    "system": [{"type": "text", "text": OUTPUT, "cache_control": {"type": "ephemeral"}}],
}
SENT: dict[str, Any] = {
    **COUNTED,
    "max_tokens": 128_000,
    "stop_sequences": [STOP],
    "metadata": {"user_id": '{"device_id":"' + "5" * 600 + '"}'},
}
IGNORED = {
    "context_management",
    "messages.content.document",
    "messages.content.image",
    "thinking.display",
}


base_url = module_chat_service(ECHO_HERMES)
client = anthropic_client


def post(base_url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": BETAS, "x-app": "cli"}
    return httpx.post(f"{base_url}{path}?beta=true", json=body, headers=headers, timeout=60)


def test_a_turn_with_a_picture_and_a_found_tool_is_served(base_url: str) -> None:
    answer = post(base_url, "/v1/messages", SENT)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[HEADER].split(", ")) == {*IGNORED, "metadata", "max_tokens"}
    calls = [block["name"] for block in answer.json()["content"] if block["type"] == "tool_use"]
    assert calls == ["mcp__x__photo"]
    streamed = post(base_url, "/v1/messages", {**SENT, "stream": True})
    assert streamed.headers[HEADER] == answer.headers[HEADER]
    assert "event: message_stop" in streamed.text


def test_the_tokens_of_the_turn_are_counted(base_url: str) -> None:
    counted = post(base_url, "/v1/messages/count_tokens", COUNTED)
    assert set(counted.headers[HEADER].split(", ")) == IGNORED
    usage = post(base_url, "/v1/messages", SENT).json()["usage"]
    used = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json()["input_tokens"] == used


def test_a_tool_that_was_not_found_yet_is_not_called(base_url: str) -> None:
    answer = post(base_url, "/v1/messages", {**SENT, "messages": SENT["messages"][:1]})
    assert [block["type"] for block in answer.json()["content"]] == ["text"]


def test_a_web_search_is_an_answer_without_one(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(
        model=ECHO_HERMES,
        max_tokens=4,
        messages=[{"role": "user", "content": "Search."}],
        tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        tool_choice={"type": "auto"},
    )
    assert raw.headers[HEADER] == "tools.web_search"
    assert raw.parse().stop_reason == "max_tokens"


def test_a_hosted_tool_that_must_be_called_is_refused(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(
            model=ECHO_HERMES,
            max_tokens=4,
            messages=[{"role": "user", "content": "Search."}],
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
            tool_choice={"type": "tool", "name": "web_search"},
        )
    assert refused.value.error_code == "unsupported_parameter"


@pytest.mark.parametrize("stream", [False, True])
def test_the_users_own_picture_is_an_error_that_agents_know(
    client: anthropic.Anthropic, stream: bool
) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, PICTURE]}]
    with pytest.raises(anthropic.BadRequestError, match="does not support image input") as refused:
        client.messages.create(model=ECHO_HERMES, max_tokens=4, messages=messages, stream=stream)
    assert (refused.value.type, refused.value.error_code) == (
        "invalid_request_error",
        "image_not_supported",
    )


def test_what_is_asked_at_the_start_is_harmless(base_url: str) -> None:
    assert httpx.head(f"{base_url}/").status_code in (200, 307, 404, 405)
    assert httpx.head(f"{base_url}/api/hello").status_code == 404
    assert httpx.get(f"{base_url}/api/claude_cli/bootstrap").status_code == 404
    listed = httpx.get(f"{base_url}/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert [model["type"] for model in listed.json()["data"]] == ["model"]


# --- the same rule in chat completions ---


def chat(*content: Any, role: str = "tool") -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "photo", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "taken"},
    ]
    if role == "tool":
        messages[-1]["content"] = list(content)
    else:
        messages.append({"role": role, "content": list(content)})
    return {"model": ECHO_HERMES, "max_tokens": 3, "messages": messages}


IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
FILE = {"type": "file", "file": {"file_data": "JVBERi0xLjQK", "filename": "a.pdf"}}


def test_a_picture_in_a_tools_result_is_left_out_in_chat_too(base_url: str) -> None:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        body: Any = chat({"type": "text", "text": "Here:"}, IMAGE_URL, AUDIO, FILE)
        raw = client.chat.completions.with_raw_response.create(**body)
        names = ("image_url", "input_audio", "file")
        assert raw.headers[HEADER] == ", ".join(f"messages.content.{name}" for name in names)
        assert raw.parse().usage is not None
        plain: Any = chat({"type": "text", "text": "Here:"})
        assert HEADER not in client.chat.completions.with_raw_response.create(**plain).headers


@pytest.mark.parametrize(("part", "kind"), [(IMAGE_URL, "image"), (AUDIO, "audio"), (FILE, "file")])
def test_the_users_own_picture_is_refused_in_chat_too(
    base_url: str, part: dict[str, Any], kind: str
) -> None:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        body: Any = chat({"type": "text", "text": "Look:"}, part, role="user")
        with pytest.raises(openai.BadRequestError, match=f"not support {kind} input") as refused:
            client.chat.completions.create(**body)
        assert refused.value.code == f"{kind}_not_supported"
        assert refused.value.param == "messages.3.content.1"
