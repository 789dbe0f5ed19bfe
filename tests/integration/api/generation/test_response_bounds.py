"""Answers that could be too long for a frontend: refused by name, or bounded by default."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.batches import batch_of
from tests.support.dialects import DIALECTS
from tests.support.running_service import MODEL, RunningService
from tests.support.service_fixtures import module_service

MESSAGES = [{"role": "user", "content": "water"}]
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "logprobs": True,
    "top_logprobs": 20,
    "max_tokens": 400,
    "ignore_eos": True,
}
FEW_BYTES = 2048  # 1 token with twenty alternatives, 256 without any

shared_service = module_service(max_answer_bytes=FEW_BYTES)

TOO_LONG: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "chat",
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 2, "max_tokens": 3},
        "max_tokens",
        "n 2, max_tokens 3, top_logprobs 20",
    ),
    (
        "chat",
        {"messages": MESSAGES, "max_completion_tokens": 300},
        "max_completion_tokens",
        "max_completion_tokens 300",
    ),
    (
        "completions",
        {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "logprobs": 2},
        "max_tokens",
        "prompts 2, n 2, max_tokens 5, logprobs 2",
    ),
    (
        "responses",
        {
            "input": "water",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 9,
            "max_output_tokens": 3,
        },
        "max_output_tokens",
        "max_output_tokens 3, top_logprobs 9",
    ),
    (
        "completions",
        {"prompt": "water " * 20, "n": 20, "max_tokens": 1, "echo": True},
        "echo",
        "n 20, max_tokens 1 and 2440 bytes of prompts (echo)",
    ),
    ("messages", {"messages": MESSAGES, "max_tokens": 300}, "max_tokens", "max_tokens 300"),
    ("generate", {"prompt": "water", "max_tokens": 200}, "max_tokens", "max_tokens 200"),
]


@pytest.mark.parametrize(("name", "params", "param", "named"), TOO_LONG)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_that_could_be_too_long_is_refused_by_name(
    client: httpx.Client,
    service: RunningService,
    name: str,
    params: dict[str, Any],
    param: str,
    named: str,
    is_streamed: bool,
) -> None:
    body = {"model": MODEL, "stream": is_streamed, **params}
    error = DIALECTS[name].error(client.post(DIALECTS[name].path, json=body), 400)
    assert named in error.message
    assert str(FEW_BYTES) in error.message
    assert (error.param, error.code) == (param, "answer_too_large")
    assert not service.worker.seen, "nothing was queued"


def test_a_row_whose_response_could_be_too_long_is_refused_by_name(client: httpx.Client) -> None:
    refused = batch_of(client, CHAT, "error_file_id")["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["code"] == "answer_too_large"


def test_a_default_of_max_tokens_is_what_fits(client: httpx.Client) -> None:
    params = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    (choice,) = client.post("/v1/chat/completions", json=params).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) == 1


def test_what_fits_is_answered(client: httpx.Client) -> None:
    params = {"model": MODEL, "messages": MESSAGES, "max_tokens": 250, "ignore_eos": True}
    for path in ("/v1/chat/completions", "/v1/messages"):
        if path == "/v1/messages":
            params.pop("ignore_eos")
        assert client.post(path, json=params).status_code == 200


def test_choices_that_are_only_ranked_count_too(client: httpx.Client) -> None:
    params = {"prompt": "a", "n": 1, "max_tokens": 10, "logprobs": 2}
    assert client.post("/v1/completions", json={"model": MODEL, **params}).status_code == 200
    more = client.post("/v1/completions", json={"model": MODEL, **params, "best_of": 4})
    assert more.status_code == 400
    assert "best_of 4, max_tokens 10, logprobs 2" in more.json()["error"]["message"]
