"""What holds while an engine really computes: the demo model, steps of as long as they take.

Nothing here is a measurement of speed. Each bound is a share of what the same run has measured, and
each is judged by the best or the middle of several tries, since the machine does other things too.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.launched import Launched
from tests.support.service_client import (
    Event,
    ServiceClient,
    launched_service,
    resident_mib,
    stream_all,
    token_ids_of,
)

PROMPT_TOKENS = 1900  # of the model's 2048
NUM_TRIES = 3
ENV = {
    "BEAT_INTERVAL_MS": "100",
    "HEALTH_INTERVAL_S": "0.05",
    "CPU_TIER": "reference",  # the slowest, so that a step is long beside everything else
    "MAX_NUM_BATCHED_TOKENS": "2048",
    "STEP_TARGET_MS": "50",  # a fraction of a long prompt, on a quick machine too
    "BLOCK_SIZE": "16",
    "NUM_KV_BLOCKS": "300",  # few, so that all of them have been written to soon
}


service = launched_service(ENV, is_forked=False)


def fresh_prompt(rng: random.Random) -> list[int]:
    """Nothing of it is in the prefix cache."""
    return [rng.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]


def first_token_s(service: ServiceClient, prompt: list[int]) -> float:
    """From the request to the first token of an engine that has nothing else to do."""
    begin_s = time.monotonic()
    return service.generate(prompt, 1)[0].at_s - begin_s


@pytest.mark.promise(
    "HTTP: `/health` does not wait for the model, and a stuck engine is detected (as a share of a "
    "step that the same run measured; never in milliseconds)"
)
@pytest.mark.alone
def test_health_answers_while_the_engine_computes(service: ServiceClient) -> None:
    """Alone, the whole prompt is one step. Who waited for steps would wait for half of one."""
    rng = random.Random(1)
    step_s = statistics.median(first_token_s(service, fresh_prompt(rng)) for _ in range(NUM_TRIES))
    prompts = [fresh_prompt(rng) for _ in range(6)]
    times = []
    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(lambda: [service.generate(prompt, 1) for prompt in prompts])
        while not computing.done():
            begin_s = time.monotonic()
            assert service.health()["status"] == "ok"
            times.append(time.monotonic() - begin_s)
        computing.result()
    assert statistics.median(times) < step_s / 4, (statistics.median(times), step_s)


def largest_gap_s(events: list[Event], begin_s: float, end_s: float) -> float:
    """The longest time without an event between these moments, their ends included."""
    moments = [begin_s, *(e.at_s for e in events if begin_s < e.at_s < end_s), end_s]
    return max(later - earlier for earlier, later in pairwise(moments))


@pytest.mark.promise("Streaming: a long prompt is computed in chunks beside running streams")
@pytest.mark.alone
def test_a_stream_goes_on_beside_a_long_prompt(service: ServiceClient) -> None:
    """In one step the prompt would hold the stream up for as long as it takes alone."""
    rng = random.Random(2)
    alone_s = statistics.median(first_token_s(service, fresh_prompt(rng)) for _ in range(NUM_TRIES))
    shares = []
    for _ in range(NUM_TRIES):
        body = {"prompt": "the wheel", "max_tokens": 1500, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool, service.stream("/generate", body) as events:
            received = [next(events) for _ in range(5)]
            begin_s = time.monotonic()
            reading: Future[list[Event]] = pool.submit(service.generate, fresh_prompt(rng), 1)
            while not reading.done():
                received.append(next(events))
            long = reading.result()
        shares.append(largest_gap_s(received, begin_s, long[0].at_s) / alone_s)
        service.until_idle()
    assert min(shares) < 0.6, (shares, alone_s)


def test_many_requests_leave_the_engines_memory_as_it_was(tmp_path: Path) -> None:
    """In the tier that a worker takes by itself. The reference tier's grows: see RELIABILITY.md."""
    env = {**ENV, "CPU_TIER": "auto"}
    with Launched(tmp_path, env, is_forked=False) as penstock, ServiceClient(penstock) as service:
        grown = growth_of(service)
    # What leaks grows each time. Of 300 MiB the bound is 20 KiB for each request.
    assert all(min(shares) < 0.01 for shares in grown.values()), grown


def growth_of(service: ServiceClient) -> dict[str, list[float]]:
    """By how large a part of itself each process grows, three times, in 150 requests."""
    pids = {name: service.pid_of(name) for name in ("worker", "worker.runtime", "api")}
    rng = random.Random(3)

    def run(count: int) -> None:
        for _ in range(count // 25):
            bodies = [
                {
                    "prompt": [rng.randrange(300, 4000) for _ in range(rng.randrange(2, 60))],
                    "max_tokens": 6,
                    "ignore_eos": True,
                }
                for _ in range(25)
            ]
            for events in asyncio.run(stream_all(service.base_url, bodies)):
                assert len(token_ids_of(events)) == 6
        service.until_idle()

    run(150)  # what is taken once is taken now: the pool's pages, and torch's own
    grown: dict[str, list[float]] = {name: [] for name in pids}
    for _ in range(3):
        before = {name: resident_mib(pid) for name, pid in pids.items()}
        run(150)
        for name, pid in pids.items():
            grown[name].append(resident_mib(pid) / before[name] - 1)
    return grown
