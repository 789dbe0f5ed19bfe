"""What agents send beyond what a model has, over HTTP in every dialect: efforts without a variable,
more tokens than the context has left, 64 stop strings, seed -1, a thousand tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import (
    MODEL,
    make_tiny_checkpoint,
    running_service,
)

HEADER = "x-penstock-ignored"
USER = [{"role": "user", "content": "hi"}]
# route -> a request, the name of the bound of its tokens, and an effort
ROUTES: dict[str, tuple[dict[str, Any], str, dict[str, Any] | None]] = {
    "/v1/chat/completions": ({"messages": USER}, "max_tokens", {"reasoning_effort": "high"}),
    "/v1/completions": ({"prompt": "hi"}, "max_completion_tokens", None),
    "/v1/responses": ({"input": "hi"}, "max_output_tokens", {"reasoning": {"effort": "high"}}),
    "/v1/messages": ({"messages": USER}, "max_tokens", {"output_config": {"effort": "high"}}),
    "/generate": ({"prompt": "hi", "stream": False}, "max_tokens", None),
}


@pytest.fixture(scope="module")
def urls(
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, str]]:
    """A service that ignores, as by default, and one that refuses."""
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("clipped"))
    with (
        running_service(redis_url, new_namespace(), checkpoint) as lenient,
        running_service(
            redis_url, new_namespace(), checkpoint, refuse_unused_parameters=True
        ) as strict,
    ):
        yield lenient.base_url, strict.base_url


def post(url: str, route: str, **members: Any) -> httpx.Response:
    body = {"model": MODEL, **ROUTES[route][0], **members}
    return httpx.post(f"{url}{route}", json=body, timeout=60)


def job_of(url: str, answer: httpx.Response) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/v1/jobs/{answer.headers['x-request-id']}").json())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("streamed", [False, True])
def test_more_tokens_than_the_context_has_left_are_clipped_and_reported(
    urls: tuple[str, str], route: str, streamed: bool
) -> None:
    lenient, strict = urls
    name = ROUTES[route][1]
    answer = post(lenient, route, **{name: 32_000}, stream=streamed)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == name
    job = job_of(lenient, answer)
    context = httpx.get(f"{lenient}/v1/models").json()["data"][0]["max_model_len"]
    assert job["sampling"]["max_tokens"] == context - job["usage"]["prompt_tokens"]
    assert HEADER not in post(lenient, route, **{name: 2}).headers
    refused = post(strict, route, **{name: 32_000})
    assert (refused.status_code, "maximum context length" in refused.text) == (400, True)
    too_long = "abc " * 3000
    prompt = {"messages": [{"role": "user", "content": too_long}]}
    key = next(iter(ROUTES[route][0]))
    refused = post(
        lenient, route, **{name: 2}, **(prompt if key == "messages" else {key: too_long})
    )
    assert (refused.status_code, "context_length_exceeded" in refused.text) == (400, True)


@pytest.mark.parametrize("route", [route for route, case in ROUTES.items() if case[2]])
def test_an_effort_that_the_template_has_no_variable_for_is_reported(
    urls: tuple[str, str], route: str
) -> None:
    lenient, strict = urls
    _, bound, effort = ROUTES[route]
    assert effort is not None
    named = {"reasoning_effort", "reasoning.effort", "output_config.effort"}
    for streamed in (False, True):
        answer = post(lenient, route, **{bound: 2}, **effort, stream=streamed)
        assert (answer.status_code, answer.headers[HEADER] in named) == (200, True), answer.text
    refused = post(strict, route, **{bound: 2}, **effort)
    assert refused.status_code == 400
    assert next(iter(effort)) in refused.text


@pytest.mark.parametrize("route", ROUTES)
def test_stops_seeds_and_whole_numbers_are_taken(urls: tuple[str, str], route: str) -> None:
    lenient, _ = urls
    bound = ROUTES[route][1]
    stops = [f"stop-{number}" for number in range(64)]
    stop = {"stop_sequences" if route == "/v1/messages" else "stop": stops}
    seed = {} if route == "/v1/messages" else {"seed": -1}
    seeds = set()
    for _ in range(2):
        answer = post(lenient, route, **{bound: 2.0}, **stop, **seed)
        assert (answer.status_code, HEADER in answer.headers) == (200, False), answer.text
        seeds.add(job_of(lenient, answer)["sampling"]["seed"])
    assert len(seeds) == 2
    assert -1 not in seeds
    if seed:
        answer = post(lenient, route, **{bound: 2}, seed=7)
        assert job_of(lenient, answer)["sampling"]["seed"] == 7
    for too_many in ([*stops, "one more"], ["x" * 500] * 17):
        refused = post(lenient, route, **{bound: 2}, **dict.fromkeys(stop, too_many))
        assert (refused.status_code, next(iter(stop)) in refused.text) == (400, True)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_each_chunk_with_choices_has_the_usage_so_far(
    urls: tuple[str, str], route: str, n: int
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = post(urls[0], route, max_tokens=6, n=n, stream=True, stream_options=options)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
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
    answer = post(urls[0], route, max_tokens=2, stream=True, stream_options=options)
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
def test_a_404_names_the_right_base_url(urls: tuple[str, str], path: str, base: str) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{urls[0]}{path}", json={})
        assert answer.status_code == 404
        assert answer.text.count(f'base URL has to be {urls[0]}{base}"') == 1, answer.text
    assert "base URL" not in httpx.get(f"{urls[0]}/nothing/here").text


def test_a_404_below_the_right_base_url_names_no_other_one(urls: tuple[str, str]) -> None:
    fim = httpx.post(f"{urls[0]}/v1/fim/completions", json={})
    assert fim.status_code == 404
    assert "/v1/completions" in fim.json()["error"]["message"]
    assert "base URL" not in fim.text
    assert "base URL" not in httpx.post(f"{urls[0]}/v1/audio/completions", json={}).text
