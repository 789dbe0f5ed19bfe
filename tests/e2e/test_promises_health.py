"""The service answers while its engine is busy: each step here takes most of half a second."""

from __future__ import annotations

import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.service_client import (
    CLOSE_LOOK,
    ServiceClient,
    launched_service,
    stream_all,
    token_ids_of,
)

pytestmark = pytest.mark.alone
STEP_S = 0.4


service = launched_service(
    {**CLOSE_LOOK, "ECHO_STEP_MS": str(STEP_S * 1000), "MAX_NUM_SEQS": "128"}, is_forked=False
)


def health_median_s(service: ServiceClient, num_times: int) -> float:
    times = []
    for _ in range(num_times):
        begin_s = time.monotonic()
        assert service.health()["status"] == "ok"
        times.append(time.monotonic() - begin_s)
    return statistics.median(times)


@pytest.mark.promise("Streaming: HTTP answers while a step runs")
def test_health_answers_while_a_step_is_in_flight(service: ServiceClient) -> None:
    with service.stream("/generate", {"prompt": "slow", "max_tokens": 5}) as events:
        next(events)
        median_s = health_median_s(service, 25)
        received = list(events)
    assert received[-1].payload is None
    # Not a measurement of speed: whoever waits for steps waits for half of one on average.
    assert median_s < STEP_S / 4


@pytest.mark.promise("Streaming: tokenizing does not hold up the event loop")
def test_health_answers_while_a_megabyte_of_prompt_is_tokenized(service: ServiceClient) -> None:
    prompt = "the keeper writes the level " * 37_000
    assert len(prompt) > 1_000_000
    with ThreadPoolExecutor(1) as pool:
        posted = pool.submit(service.http.post, "/tokenize", json={"prompt": prompt})
        times = []
        while not posted.done():
            begin_s = time.monotonic()
            assert service.health()["status"] == "ok"
            times.append(time.monotonic() - begin_s)
    tokenized = posted.result()
    assert tokenized.status_code == 200
    assert tokenized.json()["count"] > 37_000
    # Where the tokenizer keeps the interpreter to itself, one answer takes as long as the prompt
    # and only a handful comes in all: a few before the prompt is there, a few after.
    assert len(times) > 20
    assert max(times) < sum(times) / 2


@pytest.mark.promise(
    "Streaming: requests that arrive during a step start at the next one; submitting waits for no "
    "step"
)
def test_submitting_does_not_wait_for_steps(service: ServiceClient) -> None:
    """A hundred jobs come in during a few steps and start together at the next."""
    before = service.until_idle()
    with service.stream("/generate", {"prompt": [900], "max_tokens": 40}) as events:
        received = [next(events)]
        bodies = [{"prompt": [1000 + i], "max_tokens": 2} for i in range(100)]
        streams = asyncio.run(stream_all(service.base_url, bodies))
        meanwhile = service.worker()
        assert received[0].payload is not None
        assert service.http.delete(f"/v1/jobs/{received[0].payload['id']}").status_code == 200
    assert [token_ids_of(events) for events in streams] == [[1000 + i] * 2 for i in range(100)]
    # If each submit or each admission cost a step, there would be a hundred of them.
    assert meanwhile["step"] - before["step"] < 30
    service.until_idle()
