"""Connections break, go silent, or lose what the server answered."""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path

import pytest
import trustme

from tests.chaos.harness.clients import Client
from tests.chaos.harness.expected import random_prompt
from tests.chaos.harness.proxy import Proxy
from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until

KILLS = 6
RESETS, RESET_S, REST_S = 3, 4.0, 1.0
THROTTLED_STEP_S = 0.1  # a stream of 200 tokens outlasts all kills


@pytest.mark.parametrize(("kind", "after_tokens"), [("pubsub", 3), ("normal", 1)])
async def test_killed_connections_come_back_and_nothing_is_missed(
    scenario: Scenario, kind: str, after_tokens: int
) -> None:
    clients = scenario.clients(12, 200)
    before = _reconnects(scenario)
    async with scenario.middle_of(clients, after_tokens, step_s=THROTTLED_STEP_S):
        for _ in range(KILLS):
            await scenario.redis.client_kill_filter(_type=kind, skipme=True)
            await _all_go_on(clients)
    await scenario.all_finished(clients)
    if kind == "pubsub":
        assert _reconnects(scenario) > before
    await scenario.settled()


async def _all_go_on(clients: list[Client], num_tokens: int = 5) -> None:
    seen = min(client.reading.num_tokens for client in clients)
    for client in clients:
        await client.tokens(seen + num_tokens)


def _reconnects(scenario: Scenario) -> int:
    return min(f.log.count("lost the pub/sub connection") for f in scenario.deployment.frontends)


async def test_a_load_balancer_that_resets_every_connection_ends_no_stream(
    scenario: Scenario,
) -> None:
    """It accepts and resets while its backend is away: for longer than a worker's lease, three
    times. Some streams run, some wait for a place, and new requests come between the outages."""
    async with Proxy(scenario.deployment.server.url) as proxy:
        await scenario.deployment.use_workers(redis_url=proxy.url)
        await scenario.deployment.use_frontends(redis_url=proxy.url)
        clients = scenario.clients(12, 300) + scenario.clients(4, 300, on_disconnect="continue")
        async with scenario.middle_of(clients, 3, step_s=THROTTLED_STEP_S):
            for _ in range(RESETS):
                with proxy.resetting():
                    await asyncio.sleep(RESET_S)
                await _all_go_on(clients)
                clients += scenario.clients(2, 100)
                await clients[-2].tokens(1)
                await clients[-1].tokens(1)
        await scenario.all_finished(clients)
        for process in (*scenario.deployment.workers, *scenario.deployment.frontends):
            assert "RuntimeError" not in process.log, process.log
        await scenario.settled()
        await scenario.deployment.use_workers()
        await scenario.deployment.use_frontends()


async def test_a_silent_subscription_is_replaced_and_its_streams_never_stand_still(
    scenario: Scenario, tmp_path: Path
) -> None:
    async with Proxy(scenario.deployment.server.url, tmp_path / "proxy.sock") as proxy:
        await scenario.deployment.use_frontends(redis_url=proxy.url)
        clients = scenario.clients(8, 150)
        async with scenario.middle_of(clients):
            # New ones go the same way: nobody hears anything, and the log is looked into.
            proxy.blackhole_all(lambda connection: connection.is_listening)
            await _all_go_on(clients)
            for frontend in scenario.deployment.frontends:
                await until(lambda f=frontend: "lost the pub/sub connection" in f.log, "the loss")
            await _all_go_on(clients)
            proxy.blackhole_all(None)
            for frontend in scenario.deployment.frontends:
                await until(lambda f=frontend: "the store answers again" in f.log, "its return")
        await scenario.all_finished(clients)
        await scenario.settled()
        await scenario.deployment.use_frontends()


async def test_a_partitioned_worker_is_taken_over_and_its_late_words_are_refused(
    scenario: Scenario,
) -> None:
    """It goes on computing, hears nothing, and says all of it when the network is back.

    What refuses it is a race of the two that speak first: its append is fenced, or its heartbeat
    hears that the jobs are another's and drops what was not said yet.
    """
    async with Proxy(scenario.deployment.server.url) as proxy:
        (cut_off,) = await scenario.deployment.use_workers(1, redis_url=proxy.url)
        clients = scenario.clients(12, 150)
        async with scenario.middle_of(clients):
            await scenario.deployment.start_worker().ready()
            proxy.partition()
            jobs = [client.reading.job_id for client in clients]
            await scenario.all_are(jobs, attempt="2")
            proxy.heal()
            await until(lambda: _given_up(cut_off.log) == set(jobs), "its jobs to be given up")
        await scenario.all_finished(clients)
        for job_id in jobs:
            assert (await scenario.job(job_id))["attempt"] == "2"
        await scenario.settled()  # it is one of the workers still, and idle
        await scenario.deployment.use_workers()


def _given_up(worker_log: str) -> set[str]:
    """The jobs that a worker ended because they were another's."""
    given_up = r"job ended job_id=(\S+) attempt=1 reason=(?:fenced|dropped) "
    return set(re.findall(given_up, worker_log))


async def test_the_readers_of_a_partitioned_frontend_read_on_when_it_is_back(
    scenario: Scenario,
) -> None:
    """Its lease ends meanwhile: plain jobs are cancelled, those that may go on do."""
    async with Proxy(scenario.deployment.server.url) as proxy:
        deployment = scenario.deployment
        settings = {"FRONTEND_LEASE_MS": 2000, "OUTAGE_S": 120}
        await deployment.use_frontends(1, redis_url=proxy.url, **settings)
        deployment.start_frontend()
        await deployment.ready()
        plain = [scenario.client(200, first_url=0) for _ in range(3)]
        staying = [scenario.client(200, first_url=0, on_disconnect="continue") for _ in range(3)]
        elsewhere = [scenario.client(200, first_url=1) for _ in range(3)]
        async with scenario.middle_of([*plain, *staying, *elsewhere]):
            proxy.partition()
            jobs = [client.reading.job_id for client in plain]
            await scenario.all_are(jobs, state="cancelled", reason="orphaned")
            seen = [client.reading.num_keepalives for client in staying]
            for client, before in zip(staying, seen, strict=True):
                await until(lambda c=client, b=before: c.reading.num_keepalives > b + 3, "life")
            proxy.heal()
        for reading in await scenario.all_ended(plain):
            assert reading.error_code == "orphaned"
        await scenario.all_finished([*staying, *elsewhere])
        assert all(client.reading.num_connections == 1 for client in staying)
        await scenario.settled()
        await deployment.use_frontends()


async def test_both_sides_speak_tls_and_believe_only_a_certificate_they_can_check(
    scenario: Scenario, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    async with Proxy(scenario.deployment.server.url, tls=tls) as proxy:
        url = f"{proxy.url}?ssl_ca_certs={tmp_path / 'ca.pem'}"
        await scenario.deployment.use_frontends(1, redis_url=url)
        await scenario.deployment.use_workers(1, redis_url=url)
        doubting = scenario.deployment.start_worker(redis_url=proxy.url)
        clients = scenario.clients(8, 100)
        async with scenario.middle_of(clients):
            proxy.cut()
            await until(lambda: "waiting for Redis" in doubting.log, "the doubting one's word")
        await scenario.all_finished(clients)
        assert " ready " not in doubting.log
        doubting.terminate()
        assert await doubting.ended() == 0
        await scenario.settled()
        await scenario.deployment.use_workers()
        await scenario.deployment.use_frontends()


async def test_lost_replies_double_neither_jobs_nor_text(
    scenario: Scenario, tmp_path: Path
) -> None:
    async with Proxy(scenario.deployment.server.url, tmp_path / "proxy.sock") as proxy:
        await scenario.deployment.use_frontends(redis_url=proxy.url)
        await scenario.deployment.use_workers(redis_url=proxy.url)
        proxy.lose_some(scenario.rng, 0.1)
        while proxy.num_lost < 20:
            await scenario.all_finished([scenario.client(100, resumes=True) for _ in range(16)])
        proxy.loses = None
        await scenario.settled()
        await scenario.deployment.use_workers()
        await scenario.deployment.use_frontends()


async def test_a_lost_delivery_is_found_within_seconds(scenario: Scenario, tmp_path: Path) -> None:
    async with Proxy(scenario.deployment.server.url, tmp_path / "proxy.sock") as proxy:
        await scenario.deployment.use_workers(1, redis_url=proxy.url)
        prompt = random_prompt(scenario.rng)
        proxy.lose_next(b'"prompt_token_ids"')
        client = scenario.client(30, prompt=prompt)
        await scenario.all_finished([client])
        assert proxy.num_lost == 1
        assert (await scenario.job(client.reading.job_id))["attempt"] == "2"
        await scenario.settled()
        await scenario.deployment.use_workers()


@pytest.mark.parametrize("delay_s", [0.05])
async def test_a_slow_network_only_gathers_tokens(
    scenario: Scenario, tmp_path: Path, delay_s: float
) -> None:
    async with Proxy(scenario.deployment.server.url, tmp_path / "proxy.sock") as proxy:
        await scenario.deployment.use_workers(redis_url=proxy.url)
        proxy.delay_s = delay_s
        clients = scenario.clients(8, 100)
        await scenario.all_finished(clients)
        await scenario.settled()
        proxy.delay_s = 0
        await scenario.deployment.use_workers()


async def test_a_frontend_cut_off_for_reading_too_slowly_catches_up(scenario: Scenario) -> None:
    await scenario.redis.config_set("client-output-buffer-limit", "pubsub 65536 65536 1")
    # Its lease is longer than its sleep: its readers are not gone.
    (frozen,) = await scenario.deployment.use_frontends(1, FRONTEND_LEASE_MS=60_000)
    clients = scenario.clients(32, 450)
    async with scenario.middle_of(clients):
        frozen.freeze()
    jobs = [client.reading.job_id for client in clients]
    await until(lambda: _all_past(scenario, jobs, 350), "the jobs to run on")
    frozen.thaw()
    await scenario.all_finished(clients)
    assert "lost the pub/sub connection" in frozen.log
    await scenario.redis.config_set("client-output-buffer-limit", "pubsub 33554432 8388608 60")
    await scenario.settled()


async def _all_past(scenario: Scenario, job_ids: list[str], num_tokens: int) -> bool:
    return all([int((await scenario.job(job_id))["n"]) >= num_tokens for job_id in job_ids])
