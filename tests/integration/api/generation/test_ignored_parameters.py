"""Parameters that agents add, over HTTP: accepted and listed, or refused by a setting."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.lazy_import import lazy_import
from tests.support.running_service import MODEL, RunningService
from tests.support.service_fixtures import module_service

anthropic = lazy_import("anthropic")

HEADER = "x-penstock-ignored"
# As Codex, openai-agents and pydantic-ai build a request for a model that they do not know.
AGENT: dict[str, Any] = {
    "model": MODEL,
    "input": "hi",
    "max_output_tokens": 3,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "text": {"verbosity": "low"},
    "truncation": "auto",
    "prompt_cache_key": "session",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
}
IGNORED = "include, reasoning.summary, text.verbosity, truncation"


lenient = module_service()  # it ignores, as by default
strict = module_service(refuse_unused_parameters=True)


def post(service: RunningService, route: str, **members: Any) -> httpx.Response:
    return httpx.post(f"{service.base_url}{route}", json={"model": MODEL, **members}, timeout=30)


def ordered(header: str) -> list[str]:
    return sorted(header.split(", "))


def test_a_response_with_what_agents_send_names_the_ignored_parameters(
    lenient: RunningService,
) -> None:
    with OpenAI(base_url=f"{lenient.base_url}/v1", api_key="none", max_retries=0) as client:
        raw = client.responses.with_raw_response.create(**AGENT)
        assert ordered(raw.headers[HEADER]) == ordered(IGNORED)
        response = raw.parse()
        assert (response.status, response.truncation) == ("incomplete", "disabled")
        with client.responses.with_streaming_response.create(**AGENT, stream=True) as streamed:
            assert ordered(streamed.headers[HEADER]) == ordered(IGNORED)
            assert b"response.incomplete" in b"".join(streamed.iter_bytes())


def test_truncation_refuses_what_does_not_fit(lenient: RunningService) -> None:
    body = {"input": "abc " * 3000, "truncation": "auto"}
    error = post(lenient, "/v1/responses", **body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_a_chat_and_a_completion_report_them_too(lenient: RunningService) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = post(lenient, "/v1/chat/completions", **chat)
    assert answer.status_code == 200
    assert HEADER not in answer.headers
    members = {
        "verbosity": "low",
        "user": "me",
        "modalities": ["text"],
        "skip_special_tokens": True,
        "add_generation_prompt": True,
        "functions": [],
        "logit_bias": {},
        "parallel_tool_calls": True,
        "stream": True,
        "stream_options": {"include_obfuscation": True, "include_usage": True},
    }
    answer = post(lenient, "/v1/chat/completions", **chat, **members)
    assert answer.status_code == 200
    assert '"usage"' in answer.text
    expected = "stream_options.include_obfuscation, user, verbosity"
    assert ordered(answer.headers[HEADER]) == ordered(expected)
    answer = post(lenient, "/v1/completions", prompt="a", max_tokens=1, user="me", suffix="")
    assert (answer.status_code, answer.headers[HEADER]) == (200, "user")


def test_an_error_reports_them_too(lenient: RunningService) -> None:
    answer = post(lenient, "/v1/responses", input="hi", truncation="auto", max_output_tokens=0)
    assert (answer.status_code, answer.headers[HEADER]) == (400, "truncation")


def test_a_message_with_what_agents_send(lenient: RunningService, strict: RunningService) -> None:
    params: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "hi"}],
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "extra_body": {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "mcp_servers": [],
        },
    }
    with anthropic.Anthropic(base_url=lenient.base_url, api_key="none", max_retries=0) as client:
        raw = client.messages.with_raw_response.create(**params)
        assert ordered(raw.headers[HEADER]) == ["context_management", "metadata"]
    with (
        anthropic.Anthropic(base_url=strict.base_url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError, match=r"context_management|metadata"),
    ):
        client.messages.create(**params)


@pytest.mark.promise(
    "Clients: parameters without effect are accepted and reported, or refused if a setting asks "
    "for it; other values are a 400 that names the parameter"
)
@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_a_setting_refuses_them_by_name(
    strict: RunningService, members: dict[str, Any], param: str
) -> None:
    with OpenAI(base_url=f"{strict.base_url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input="hi", **members)
        assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")
        kept = client.responses.create(
            model=MODEL, input="hi", max_output_tokens=2, truncation="disabled", metadata={"a": "b"}
        )
        assert kept.metadata == {"a": "b"}


def test_a_page_may_read_what_was_ignored(lenient: RunningService) -> None:
    answer = httpx.get(f"{lenient.base_url}/v1/models", headers={"origin": "http://localhost:3000"})
    assert HEADER in answer.headers["access-control-expose-headers"].split(", ")
