"""What agents send beyond what a model has, over HTTP in every dialect: efforts without a variable,
more tokens than the context has left, 64 stop strings, seed -1, a thousand tools."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.dialects import DIALECTS, Dialect
from tests.support.running_service import RunningService
from tests.support.service_fixtures import module_service
from tests.support.sse_readers import payloads

HEADER = "x-penstock-ignored"
EFFORTS: dict[str, dict[str, Any]] = {
    "chat": {"reasoning_effort": "high"},
    "responses": {"reasoning": {"effort": "high"}},
    "messages": {"output_config": {"effort": "high"}},
}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)
lenient = module_service()  # it ignores, as by default
strict = module_service(refuse_unused_parameters=True)


def post(service: RunningService, dialect: Dialect, **members: Any) -> httpx.Response:
    with httpx.Client(base_url=service.base_url, timeout=60) as client:
        return dialect.post(client, **members)


@every_dialect
@pytest.mark.parametrize("streamed", [False, True])
def test_more_tokens_than_the_context_has_left_are_clipped_and_reported(
    lenient: RunningService, strict: RunningService, dialect: Dialect, streamed: bool
) -> None:
    name = dialect.names.get("max_tokens", "max_tokens")
    answer = post(lenient, dialect, max_tokens=32_000, stream=streamed)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == name
    job = lenient.job(answer.headers["x-request-id"])
    context_tokens = lenient.card.max_model_len
    assert job["sampling"]["max_tokens"] == context_tokens - job["usage"]["prompt_tokens"]
    assert HEADER not in post(lenient, dialect, max_tokens=2).headers
    refused = post(strict, dialect, max_tokens=32_000)
    assert "maximum context length" in dialect.error(refused, 400).message


def test_the_older_bound_of_completions_is_known(lenient: RunningService) -> None:
    answer = post(lenient, DIALECTS["completions"], max_tokens=None, max_completion_tokens=32_000)
    assert answer.headers[HEADER] == "max_completion_tokens"


@pytest.mark.parametrize("name", EFFORTS)
def test_an_effort_that_the_template_has_no_variable_for_is_reported(
    lenient: RunningService, strict: RunningService, name: str
) -> None:
    named = {"reasoning_effort", "reasoning.effort", "output_config.effort"}
    for streamed in (False, True):
        answer = post(lenient, DIALECTS[name], **EFFORTS[name], stream=streamed)
        assert (answer.status_code, answer.headers[HEADER] in named) == (200, True), answer.text
    refused = post(strict, DIALECTS[name], **EFFORTS[name])
    assert next(iter(EFFORTS[name])) in DIALECTS[name].error(refused, 400).message


@every_dialect
def test_stops_seeds_and_whole_numbers_are_taken(lenient: RunningService, dialect: Dialect) -> None:
    stops = [f"stop-{number}" for number in range(64)]
    seeds = set()
    for _ in range(2):
        answer = post(lenient, dialect, max_tokens=2.0, stop=stops, seed=-1)
        assert (answer.status_code, HEADER in answer.headers) == (200, False), answer.text
        seeds.add(lenient.job(answer.headers["x-request-id"])["sampling"]["seed"])
    assert len(seeds) == 2
    assert -1 not in seeds
    if "seed" not in dialect.lacking:
        answer = post(lenient, dialect, seed=7)
        assert lenient.job(answer.headers["x-request-id"])["sampling"]["seed"] == 7


@pytest.mark.parametrize("name", ["chat", "completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_each_chunk_with_choices_has_the_usage_so_far(
    lenient: RunningService, name: str, n: int
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"stream": True, "stream_options": options}
    answer = post(lenient, DIALECTS[name], max_tokens=6, n=n, **asked)
    chunks = payloads(answer.content)
    whole = chunks.pop()
    assert whole["choices"] == []
    assert all(chunk["choices"] and chunk["usage"] for chunk in chunks)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"] >= 6
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    options["continuous_usage_stats"] = False
    answer = post(lenient, DIALECTS[name], max_tokens=2, **asked)
    assert '"usage":null' in answer.text


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/v1/v1/chat/completions", "/v1"),
        ("/chat/completions", "/v1"),
        ("//v1/chat/completions", "/v1"),
        ("/v1//chat/completions", "/v1"),
        ("/api/v1/responses", "/v1"),
        ("/models", "/v1"),
        ("/v1/v1/messages", ""),
        ("/messages", ""),
        ("/v1/generate", ""),
    ],
)
def test_a_404_names_the_right_base_url(lenient: RunningService, path: str, base: str) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{lenient.base_url}{path}", json={})
        assert answer.status_code == 404
        assert answer.text.count(f'base URL has to be {lenient.base_url}{base}"') == 1, answer.text
    assert "base URL" not in httpx.get(f"{lenient.base_url}/nothing/here").text


def test_a_404_below_the_right_base_url_names_no_other_one(lenient: RunningService) -> None:
    fim = httpx.post(f"{lenient.base_url}/v1/fim/completions", json={})
    assert fim.status_code == 404
    assert "/v1/completions" in fim.json()["error"]["message"]
    assert "base URL" not in fim.text
    assert "base URL" not in httpx.post(f"{lenient.base_url}/v1/audio/completions", json={}).text
