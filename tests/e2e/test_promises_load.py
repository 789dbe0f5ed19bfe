"""Many requests, many leavers, too many at once: what is left afterwards, and what it costs to
wait for the next one."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from shared.keys import Keys
from tests.support.launched import Launched
from tests.support.redis_server import KEYS_WITHOUT_TTL
from tests.support.service_client import (
    CLOSE_LOOK,
    TIMEOUT_S,
    ServiceClient,
    cpu_s,
    echo,
    launched_service,
    resident_mib,
    stream_all,
    token_ids_of,
)

IDLE_S = 3.0
STEP_S = 0.002
KEYS = Keys()


service = launched_service(
    {"RUNNER": "echo", "ECHO_STEP_MS": str(STEP_S * 1000), "HEALTH_INTERVAL_S": "0.1"},
    is_forked=False,
)


def assert_nothing_is_left(service: ServiceClient) -> None:
    """In the worker's table, in the pool, at the frontend, in Redis."""
    service.until_idle()
    service.until(
        lambda: "penstock:streams_open 0.0" in service.http.get("/metrics").text, "no streams"
    )
    with service.redis() as server:
        service.until(
            lambda: server.pubsub_channels(f"{KEYS.prefix}ch:*") == [], "no channel of a job"
        )
        assert server.zcard(f"{KEYS.prefix}live") == 0
        immortal = {KEYS.meta, *(KEYS.prefix + name for name in KEYS_WITHOUT_TTL)}
        for key in server.scan_iter(f"{KEYS.prefix}*", count=1000):
            if key.decode() not in immortal:
                assert server.pttl(key) > 0, key
        queues = list(server.scan_iter(f"{KEYS.prefix}q:*"))
        assert queues
        assert all(server.xlen(queue) == 0 for queue in queues)


def run_many(service: ServiceClient, count: int) -> None:
    for first in range(0, count, 50):
        bodies = [{"prompt": [10 + first + i, 7], "max_tokens": 4} for i in range(50)]
        for body, events in zip(
            bodies, asyncio.run(stream_all(service.base_url, bodies)), strict=True
        ):
            assert token_ids_of(events) == echo(body["prompt"], 4)  # type: ignore[arg-type]


@pytest.mark.promise("Streaming: an ended stream leaves nothing in tables, channels or keys")
@pytest.mark.promise(
    "HTTP: memory stays flat over many requests (memory of the processes, with the echo runner and "
    "with the demo model in its default tier, blocks and keys; a device's memory needs a device)"
)
@pytest.mark.promise("HTTP: an end frees blocks and tables")
@pytest.mark.promise("HTTP: frontends hold no model")
@pytest.mark.promise("HTTP: blocks are freed at every end")
def test_many_requests_leave_nothing_behind(service: ServiceClient) -> None:
    pids = {name: service.pid_of(name) for name in ("worker", "worker.runtime", "api")}
    run_many(service, 300)
    assert_nothing_is_left(service)
    before = {name: resident_mib(pid) for name, pid in pids.items()}
    run_many(service, 500)
    assert_nothing_is_left(service)
    grown = {name: resident_mib(pid) - before[name] for name, pid in pids.items()}
    # A job that stays in a table costs some kilobytes; 500 of them would show.
    assert all(mib < 4 for mib in grown.values()), grown
    # A frontend holds no model: there may be many of them on a machine.
    assert resident_mib(pids["api"]) < 300


async def leave_at_random(base_url: str, rng: random.Random, count: int) -> None:
    limits = httpx.Limits(max_connections=40, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, limits=limits) as client:

        async def one(patience_s: float, streamed: bool) -> None:
            body = {"prompt": "a wheel and a gate", "max_tokens": 1900, "stream": streamed}
            try:
                async with (
                    asyncio.timeout(patience_s),
                    client.stream("POST", "/generate", json=body) as response,
                ):
                    async for _ in response.aiter_lines():
                        pass
            except TimeoutError:
                return
            raise AssertionError("it should have left before the end")

        await asyncio.gather(
            *(one(rng.uniform(0.01, 0.5), rng.random() < 0.7) for _ in range(count))
        )


@pytest.mark.promise("Chat: disconnects at random moments affect no other client")
def test_two_hundred_disconnects_at_random_leave_everything_alive(service: ServiceClient) -> None:
    processes = set(service.penstock.descendants())
    asyncio.run(leave_at_random(service.base_url, random.Random(5), 200))
    assert_nothing_is_left(service)
    assert set(service.penstock.descendants()) == processes
    assert "Traceback" not in service.penstock.output
    assert token_ids_of(service.generate([5, 6], 5)) == [5, 6, 5, 6, 5]


@pytest.mark.promise("Streaming: idle costs next to nothing, and the next request starts at once")
@pytest.mark.promise("HTTP: idle does not spin, nor do waiting streams")
@pytest.mark.alone
def test_an_idle_service_costs_next_to_nothing_and_wakes_at_once(service: ServiceClient) -> None:
    service.until_idle()
    pids = {name: service.pid_of(name) for name in ("worker", "worker.runtime", "api")}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    begin_s = time.monotonic()
    time.sleep(IDLE_S)  # the one thing to be observed here is time that passes
    idle_s = time.monotonic() - begin_s
    shares = {name: (cpu_s(pid) - before[name]) / idle_s for name, pid in pids.items()}
    # A loop that spins takes a whole core, one that polls every millisecond a fifth.
    assert shares["worker.runtime"] < 0.01, shares
    assert shares["worker"] < 0.03, shares
    assert shares["api"] < 0.1, shares
    waits_s, answers_s = [], []
    for _ in range(5):
        begin_s = time.monotonic()
        service.health()
        answers_s.append(time.monotonic() - begin_s)
        begin_s = time.monotonic()
        waits_s.append(service.generate("awake", 1)[0].at_s - begin_s)
    # An answer of this frontend and a step, several times over: the way goes through four
    # processes. A pull waits for five seconds here, one that no job woke for half of them.
    wait_s, answer_s = statistics.median(waits_s), statistics.median(answers_s)
    assert wait_s < 20 * (answer_s + STEP_S), (waits_s, answers_s)


@pytest.mark.promise(
    "Streaming: over the limit a request is refused at once with `Retry-After`; accepted ones are "
    "not affected"
)
@pytest.mark.alone
def test_too_many_at_once_are_refused_and_the_others_do_not_notice(tmp_path: Path) -> None:
    env = {
        **CLOSE_LOOK,
        "ECHO_STEP_MS": "60",  # a busy machine takes a while to send a hundred requests
        "MAX_NUM_SEQS": "2",
        "MAX_QUEUED_JOBS": "10",
        "MAX_QUEUE_SHARE_PER_TENANT": "1",
    }
    with Launched(tmp_path, env, is_forked=False) as penstock:

        async def send_all() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=100)
            async with httpx.AsyncClient(
                base_url=penstock.base_url, timeout=TIMEOUT_S, limits=limits
            ) as client:
                bodies = [
                    {"prompt": [40 + i], "max_tokens": 15, "stream": False} for i in range(100)
                ]
                return await asyncio.gather(
                    *(client.post("/generate", json=body) for body in bodies)
                )

        answers = asyncio.run(send_all())
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 503}
    # Two run, ten wait, and while a hundred come in some may end and make room.
    assert statuses[200] >= 10, statuses
    assert statuses[503] >= 20, statuses
    for number, answer in enumerate(answers):
        if answer.status_code == 200:
            assert answer.json()["token_ids"] == [40 + number] * 15
        else:
            assert answer.json()["error"]["code"] == "server_overloaded"
            assert int(answer.headers["retry-after"]) >= 1
