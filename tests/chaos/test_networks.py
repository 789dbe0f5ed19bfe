"""Connections break, go silent, or lose what the server answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.harness.expected import random_prompt
from tests.chaos.harness.polling import until
from tests.chaos.harness.proxy import Proxy
from tests.chaos.harness.stage import Stage

KILLS = 6


async def test_killed_subscribers_come_back_and_nothing_is_missed(stage: Stage) -> None:
    clients = stage.clients(12, 200)
    for client in clients:
        await client.tokens(3)
    before = _reconnects(stage)
    for _ in range(KILLS):
        seen = min(client.reading.num_tokens for client in clients)
        await stage.redis.client_kill_filter(_type="pubsub")
        await until(
            lambda n=seen: min(client.reading.num_tokens for client in clients) > n + 10,
            "every stream to go on",
        )
    await stage.all_finished(clients)
    assert _reconnects(stage) > before
    await stage.settled()


def _reconnects(stage: Stage) -> int:
    return min(f.log.count("pub/sub connection lost") for f in stage.deployment.frontends)


async def test_killed_command_connections_come_back_and_nothing_is_missed(stage: Stage) -> None:
    clients = stage.clients(12, 200)
    for _ in range(KILLS):
        seen = min(client.reading.num_tokens for client in clients)
        await stage.redis.client_kill_filter(_type="normal", skipme=True)
        await until(
            lambda n=seen: min(client.reading.num_tokens for client in clients) > n + 10,
            "every stream to go on",
        )
    await stage.all_finished(clients)
    await stage.settled()


async def test_a_silent_subscription_is_replaced_and_its_streams_never_stand_still(
    stage: Stage, tmp_path: Path
) -> None:
    async with Proxy(stage.deployment.server.url, tmp_path / "proxy.sock") as proxy:
        await stage.deployment.use_frontends(redis_url=proxy.url)
        clients = stage.clients(8, 350)
        for client in clients:
            await client.tokens(5)
        assert proxy.blackhole(lambda connection: connection.is_listening) == 2
        clock, longest_s = asyncio.get_running_loop().time, 0.0
        seen, since_s = 0, clock()
        while not all(client.reading.has_ended for client in clients):
            tokens = sum(client.reading.num_tokens for client in clients)
            if tokens > seen:
                longest_s = max(longest_s, clock() - since_s)
                seen, since_s = tokens, clock()
            await asyncio.sleep(0.01)
        assert longest_s < 3.0  # the log is looked into after a second of silence
        await stage.all_finished(clients)
        for frontend in stage.deployment.frontends:
            assert "pub/sub connection lost" in frontend.log
        await stage.settled()
        await stage.deployment.use_frontends()


async def test_lost_replies_double_neither_jobs_nor_text(stage: Stage, tmp_path: Path) -> None:
    async with Proxy(stage.deployment.server.url, tmp_path / "proxy.sock") as proxy:
        await stage.deployment.use_frontends(redis_url=proxy.url)
        await stage.deployment.use_workers(redis_url=proxy.url)
        proxy.lose_some(stage.rng, 0.1)
        clients = [stage.client(100, resumes=True) for _ in range(16)]
        readings = await stage.all_ended(clients)
        proxy.loses = None
        assert proxy.num_lost > 10
        assert sum(reading.finished for reading in readings) == 16
        await stage.settled()
        await stage.deployment.use_workers()
        await stage.deployment.use_frontends()


async def test_a_lost_delivery_is_found_within_seconds(stage: Stage, tmp_path: Path) -> None:
    async with Proxy(stage.deployment.server.url, tmp_path / "proxy.sock") as proxy:
        await stage.deployment.use_workers(1, redis_url=proxy.url)
        prompt = random_prompt(stage.rng)
        proxy.lose_next(b'"prompt_token_ids"')
        client = stage.client(30, prompt=prompt)
        await client.tokens(1, timeout_s=5)
        assert proxy.num_lost == 1
        await stage.all_finished([client])
        assert (await stage.job(client.reading.job_id))["attempt"] == "2"
        await stage.settled()
        await stage.deployment.use_workers()


@pytest.mark.parametrize("delay_s", [0.05])
async def test_a_slow_network_only_gathers_tokens(
    stage: Stage, tmp_path: Path, delay_s: float
) -> None:
    async with Proxy(stage.deployment.server.url, tmp_path / "proxy.sock") as proxy:
        await stage.deployment.use_workers(redis_url=proxy.url)
        proxy.delay_s = delay_s
        clients = stage.clients(8, 100)
        await stage.all_finished(clients)
        await stage.settled()
        proxy.delay_s = 0
        await stage.deployment.use_workers()


async def test_a_frontend_cut_off_for_reading_too_slowly_catches_up(stage: Stage) -> None:
    await stage.redis.config_set("client-output-buffer-limit", "pubsub 65536 65536 1")
    # Its lease is longer than its sleep: its readers are not gone.
    (frozen,) = await stage.deployment.use_frontends(1, FRONTEND_LEASE_MS=60_000)
    clients = stage.clients(32, 450)
    for client in clients:
        await client.tokens(5)
    frozen.freeze()
    jobs = [client.reading.job_id for client in clients]
    await until(lambda: _all_past(stage, jobs, 350), "the jobs to run on")
    frozen.thaw()
    await stage.all_finished(clients)
    assert "pub/sub connection lost" in frozen.log
    await stage.redis.config_set("client-output-buffer-limit", "pubsub 33554432 8388608 60")
    await stage.settled()


async def _all_past(stage: Stage, job_ids: list[str], num_tokens: int) -> bool:
    return all([int((await stage.job(job_id))["n"]) >= num_tokens for job_id in job_ids])
