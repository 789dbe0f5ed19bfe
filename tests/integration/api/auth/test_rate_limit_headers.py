"""Headers tell what is left of a minute's allowances: in both dialects, whole and streamed."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import httpx
import openai
import pytest

from tests.support.dialects import DIALECTS, Dialect
from tests.support.keys import Keys
from tests.support.lazy_import import lazy_import
from tests.support.running_service import MODEL, RunningService
from tests.support.service_fixtures import module_service, service

anthropic = lazy_import("anthropic")

KEYS = Keys(
    three="requests_per_minute=3",
    one="requests_per_minute=1",
    tokens="tokens_per_minute=6000",
    both="requests_per_minute=100 tokens_per_minute=100000",
    free="",
    sdk="requests_per_minute=1 tokens_per_minute=100000",
    theirs="requests_per_minute=1 tokens_per_minute=100000",
    again="requests_per_minute=5",
    prompts="requests_per_minute=2",
)
PROMPT = {"prompt": "a gate and a wheel", "max_tokens": 8, "stream": False}
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "water"}],
}


every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)
shared_service = module_service(api_keys=KEYS.lines)
limited = service


def client_of(service: RunningService, tenant: str) -> httpx.Client:
    return KEYS.client(service.base_url, tenant)


def rate_limits(headers: httpx.Headers) -> dict[str, str]:
    """The headers that tell of allowances, in whichever dialect."""
    return {name: value for name, value in headers.items() if "ratelimit" in name}


def seconds_of(duration: str) -> float:
    found = re.fullmatch(r"(?=.)(?:(\d+)h)?(?:(\d+)m)?(?:([\d.]+)s)?(?:(\d+)ms)?", duration)
    assert found is not None, duration
    hours, minutes, seconds, ms = (float(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds + ms / 1000


def pass_time(service: RunningService, tenant: str, seconds: float) -> None:
    """As if so much time had passed for the tenant's requests."""
    redis: Any = service.transport.connections.commands
    key = service.transport.keys.limit(tenant)
    service.call(redis.hincrby(key, "requests_ms", -round(seconds * 1000)))


@pytest.mark.promise(
    "Access: a tenant with limits gets the rest in response headers, in its dialect (as of the "
    "admission; none for rows of a batch)"
)
def test_what_remains_counts_down_to_the_refusal(limited: RunningService) -> None:
    with client_of(limited, "three") as client:
        answers = [client.post("/generate", json=PROMPT) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    received = [rate_limits(answer.headers) for answer in answers]
    assert [output["x-ratelimit-remaining-requests"] for output in received] == ["2", "1", "0", "0"]
    assert {output["x-ratelimit-limit-requests"] for output in received} == {"3"}
    resets = [seconds_of(output["x-ratelimit-reset-requests"]) for output in received]
    assert 0 < resets[0] < resets[1] < resets[2] <= 60
    assert 40 < resets[3] <= resets[2]
    assert all(len(output) == 3 for output in received), "tokens have no limit"


def test_a_request_after_the_reset_is_accepted_and_none_before(limited: RunningService) -> None:
    with client_of(limited, "one") as client:
        assert client.post("/generate", json=PROMPT).status_code == 200
        refused = client.post("/generate", json=PROMPT)
        assert refused.status_code == 429
        reset_s = seconds_of(refused.headers["x-ratelimit-reset-requests"])
        assert int(refused.headers["retry-after"]) >= min(60, reset_s)
        assert reset_s > 40
        pass_time(limited, "one", reset_s - 40)
        assert client.post("/generate", json=PROMPT).status_code == 429
        pass_time(limited, "one", 40)
        assert client.post("/generate", json=PROMPT).status_code == 200


def test_the_time_of_a_reset_is_time_that_passes(limited: RunningService) -> None:
    """What is larger than the whole allowance waits until all of it is left."""
    limited.script.starts = False  # nothing ends and gives back what it did not take
    one = {"model": MODEL, "prompt": "a", "max_tokens": 300, "stream": True}
    larger = {**one, "n": 24}
    with ExitStack() as stack:
        client = stack.enter_context(client_of(limited, "tokens"))
        taken = stack.enter_context(client.stream("POST", "/v1/completions", json=one))
        assert taken.status_code == 200
        assert 5600 < int(taken.headers["x-ratelimit-remaining-tokens"]) < 5700
        refused = client.post("/v1/completions", json=larger)
        assert refused.status_code == 429
        assert int(refused.headers["x-ratelimit-remaining-tokens"]) > 5600
        reset_s = seconds_of(refused.headers["x-ratelimit-reset-tokens"])
        assert 0 < reset_s < 4
        time.sleep(reset_s)
        accepted = stack.enter_context(client.stream("POST", "/v1/completions", json=larger))
        assert accepted.status_code == 200
        assert accepted.headers["x-ratelimit-remaining-tokens"] == "0"
        assert seconds_of(accepted.headers["x-ratelimit-reset-tokens"]) > 60


@pytest.mark.parametrize("streamed", [False, True])
@every_dialect
def test_every_route_has_the_headers_on_responses_and_streams(
    limited: RunningService, dialect: Dialect, streamed: bool
) -> None:
    limited.script.starts = not streamed  # a stream's headers come before any token
    with ExitStack() as stack:
        client = stack.enter_context(client_of(limited, "both"))
        body = dialect.body(stream=streamed)
        answer = stack.enter_context(client.stream("POST", dialect.path, json=body))
        assert answer.status_code == 200
        output = rate_limits(answer.headers)
        assert len(output) == 6
        if dialect.name == "messages":
            assert output["anthropic-ratelimit-requests-limit"] == "100"
            assert int(output["anthropic-ratelimit-requests-remaining"]) < 100
            assert output["anthropic-ratelimit-tokens-limit"] == "100000"
            assert 90_000 < int(output["anthropic-ratelimit-tokens-remaining"]) < 100_000
        else:
            assert output["x-ratelimit-limit-requests"] == "100"
            assert int(output["x-ratelimit-remaining-requests"]) < 100
            assert output["x-ratelimit-limit-tokens"] == "100000"
            assert 90_000 < int(output["x-ratelimit-remaining-tokens"]) < 100_000
            assert 0 < seconds_of(output["x-ratelimit-reset-tokens"]) < 10


def test_a_response_in_the_background_has_the_headers(limited: RunningService) -> None:
    with client_of(limited, "both") as client:
        begun = DIALECTS["responses"].post(client, background=True)
        assert begun.json()["status"] == "queued"
        assert len(rate_limits(begun.headers)) == 6


@every_dialect
def test_without_limits_there_are_no_rate_limit_headers(
    limited: RunningService, dialect: Dialect
) -> None:
    with client_of(limited, "free") as client:
        answer = dialect.post(client)
        assert answer.status_code == 200
        assert rate_limits(answer.headers) == {}


def test_responses_without_a_charge_have_no_rate_limit_headers(limited: RunningService) -> None:
    with client_of(limited, "both") as client:
        for answer in (
            client.get("/v1/models"),
            client.post("/tokenize", json={"prompt": "water"}),
            client.post("/generate", json={**PROMPT, "max_tokens": -1}),
        ):
            assert rate_limits(answer.headers) == {}


def test_a_request_sent_again_gets_the_remaining_limits_and_is_charged_nothing(
    limited: RunningService,
) -> None:
    key = {"idempotency-key": "once"}
    with client_of(limited, "again") as client:
        first, again = (client.post("/generate", json=PROMPT, headers=key) for _ in range(2))
        assert first.json()["id"] == again.json()["id"]
        for answer in (first, again):
            assert answer.headers["x-ratelimit-remaining-requests"] == "4"
        assert client.post("/generate", json=PROMPT).headers["x-ratelimit-remaining-requests"] in (
            "3",
            "4",
        )


def test_each_prompt_counts_and_headers_are_those_after_the_last(limited: RunningService) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 4}
    with client_of(limited, "prompts") as client:
        accepted, refused = (client.post("/v1/completions", json=body) for _ in range(2))
    assert (accepted.status_code, refused.status_code) == (200, 429)
    assert accepted.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_openais_sdk_reads_them(limited: RunningService) -> None:
    with openai.OpenAI(
        base_url=f"{limited.base_url}/v1", api_key=KEYS["sdk"], max_retries=0
    ) as sdk:
        raw = sdk.chat.completions.with_raw_response.create(**ASK)
        assert raw.parse().choices
        assert raw.headers["x-ratelimit-limit-requests"] == "1"
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) < 100_000
        assert 40 < seconds_of(raw.headers["x-ratelimit-reset-requests"]) <= 60
        with pytest.raises(openai.RateLimitError) as refused:
            sdk.chat.completions.create(**ASK)
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"


def test_anthropics_sdk_reads_them_in_its_own_names(limited: RunningService) -> None:
    with anthropic.Anthropic(
        base_url=limited.base_url, api_key=KEYS["theirs"], max_retries=0
    ) as sdk:
        before = datetime.now(UTC)
        raw = sdk.messages.with_raw_response.create(**ASK)
        assert raw.parse().content
        with pytest.raises(anthropic.RateLimitError) as refused:
            sdk.messages.create(**ASK)
    for headers in (raw.headers, refused.value.response.headers):
        output = rate_limits(headers)
        assert all(name.startswith("anthropic-ratelimit-") for name in output)
        assert output["anthropic-ratelimit-requests-limit"] == "1"
        assert output["anthropic-ratelimit-requests-remaining"] == "0"
        reset = datetime.fromisoformat(output["anthropic-ratelimit-requests-reset"])
        assert 40 < (reset - before).total_seconds() < 75
