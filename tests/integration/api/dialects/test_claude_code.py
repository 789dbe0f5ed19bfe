"""What Claude Code sends, by HTTP and by the SDKs, to real workers: served, or left out and named.

The members, blocks and tools are those of its requests; the texts are not.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.api.chat_service import ECHO_HERMES, STOP, hermes_call, module_chat_service
from tests.support.claude_code import BETAS, PICTURE, TURN
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import redis_url  # noqa: F401
from tests.support.service_fixtures import anthropic_client

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
