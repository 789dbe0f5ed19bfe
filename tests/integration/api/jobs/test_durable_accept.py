"""A request is accepted when it is as durable as requested, which its response says."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.batches import begin_batch, ended_batch
from tests.support.dialects import DIALECTS, Dialect
from tests.support.redis_server import new_namespace
from tests.support.redis_topologies import HAS_WAITAOF, NO_WAITAOF, Server, free_ports
from tests.support.running_service import (
    MODEL,
    RunningService,
    running_frontend,
    running_service,
    wait_until,
)

HEADER = "x-penstock-durability"
needs_waitaof = pytest.mark.skipif(not HAS_WAITAOF, reason="this server is older than 7.2")
# Two prompts of one request are two jobs; one in the background is accepted before it runs.
MEMBERS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": ["a", "b"]},
    "responses": {"background": True},
}
BACKGROUND = DIALECTS["responses"].body(background=True)
every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)


@contextmanager
def servers(*all_options: tuple[str, ...]) -> Iterator[list[Server]]:
    with tempfile.TemporaryDirectory(prefix="penstock-durable-") as directory, ExitStack() as stack:
        made = []
        for options, port in zip(all_options, free_ports(len(all_options)), strict=True):
            made.append(Server(Path(directory), f"server-{port}", port, *options))
            stack.callback(made[-1].close)
            made[-1].start()
        yield made


def url_of(server: Server) -> str:
    return f"redis://127.0.0.1:{server.port}"


@pytest.mark.promise(
    "Responses: it is accepted with the requested durability, which the response reports"
)
@needs_waitaof
@every_dialect
def test_a_response_reports_what_its_acceptance_waited_for(
    client: httpx.Client, dialect: Dialect
) -> None:
    members = MEMBERS.get(dialect.name, {})
    answer = dialect.post(client, **members, durability="fsync")
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "fsync"
    job = client.get(f"/v1/jobs/{answer.headers['x-request-id']}").json()
    assert job["durability"] == "fsync"
    for more in ({}, {"durability": "none"}):
        plain = dialect.post(client, **members, **more)
        assert HEADER not in plain.headers
        job = client.get(f"/v1/jobs/{plain.headers['x-request-id']}").json()
        assert job["durability"] == "none"


@needs_waitaof
def test_a_stream_begins_when_it_is_accepted_so(client: httpx.Client) -> None:
    dialect = DIALECTS["chat"]
    body = dialect.body(stream=True, durability="fsync")
    with client.stream("POST", dialect.path, json=body) as answer:
        assert answer.headers[HEADER] == "fsync"
        assert answer.read().endswith(b"data: [DONE]\n\n")


@every_dialect
def test_while_replicas_are_away_a_request_for_them_is_to_be_repeated_and_makes_no_job(
    client: httpx.Client, dialect: Dialect
) -> None:
    answer = dialect.post(client, **MEMBERS.get(dialect.name, {}), durability="replicas")
    error = dialect.error(answer, 503, "service_unavailable")
    assert "0 of 1 replicas" in error.message
    assert "retry-after" in answer.headers
    assert HEADER not in answer.headers
    assert client.get(f"/v1/jobs/{answer.headers['x-request-id']}").status_code == 404


@needs_waitaof
def test_the_prompts_of_one_request_wait_together(checkpoint: Path) -> None:
    """A probe of what the server can do for each of them, and one wait for all."""
    num_prompts = 8
    with (
        servers(()) as (server,),
        running_service(url_of(server), new_namespace(), checkpoint) as service,
        httpx.Client(base_url=service.base_url, timeout=20) as client,
    ):
        server.client.config_resetstat()
        body = {"model": MODEL, "prompt": ["a"] * num_prompts, "max_tokens": 2}
        answer = client.post("/v1/completions", json={**body, "durability": "fsync"})
        assert answer.headers[HEADER] == "fsync"
        num_waits = server.client.info("commandstats")["cmdstat_waitaof"]["calls"] - num_prompts
        assert 1 <= num_waits <= 2, "twice where the server did not know the script"
        pattern = f"{service.settings.namespace}:{{p0}}:job:*"
        keys = list(server.client.scan_iter(pattern))
        noted = [server.client.hget(key, "durability") for key in keys]
        assert noted == [b"fsync"] * num_prompts


@needs_waitaof
def test_a_batch_is_accepted_durably(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    assert begin_batch(client, body, durability="replicas").status_code == 503
    assert client.get("/v1/batches").json()["data"] == []
    made = begin_batch(client, body, durability="fsync")
    assert (made.status_code, made.headers[HEADER]) == (200, "fsync")
    assert ended_batch(client, made.json()["id"])["status"] == "completed"


@needs_waitaof
def test_what_the_server_cannot_do_at_all_is_refused_by_name(checkpoint: Path) -> None:
    with (
        servers(("--appendonly", "no")) as (server,),
        running_service(url_of(server), new_namespace(), checkpoint) as service,
        httpx.Client(base_url=service.base_url, timeout=20) as client,
    ):
        for dialect in (DIALECTS["responses"], DIALECTS["chat"]):
            answer = dialect.post(client, durability="fsync")
            assert dialect.error(answer, 400).param == "durability"
        counted = 'penstock:requests_total{kind="chat",outcome="refused_400"} 1.0'
        assert counted in client.get("/metrics").text


@needs_waitaof
def test_what_is_not_confirmed_in_time_is_answered_503_and_cancelled(checkpoint: Path) -> None:
    with (
        servers(("--appendfsync", "no")) as (server,),
        running_service(
            url_of(server), new_namespace(), checkpoint, accept_timeout_s=0.3
        ) as service,
        httpx.Client(base_url=service.base_url, timeout=20) as client,
    ):
        service.park()
        body = {**BACKGROUND, "durability": "fsync"}
        answer = client.post("/v1/responses", json=body)
        assert answer.status_code == 503, answer.text
        assert "did not confirm 'fsync'" in answer.json()["error"]["message"]
        assert HEADER not in answer.headers
        assert "retry-after" in answer.headers
        job = client.get(f"/v1/jobs/{answer.headers['x-request-id']}").json()
        assert job["status"] == "cancelled"
        keyed = client.post("/v1/responses", json=body, headers={"Idempotency-Key": "k"})
        assert keyed.status_code == 503
        job = client.get(f"/v1/jobs/{keyed.headers['x-request-id']}").json()
        assert job["status"] == "queued", "its caller sends it again under its key"


def test_replicas_by_setting(checkpoint: Path) -> None:
    settings = {"accept_durability": "replicas", "accept_timeout_s": 0.5}
    with servers((), ()) as (primary, replica):
        replica.client.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: len(primary.client.role()[2]) == 1, "the replica")
        # It is listed up to a second before it confirms anything.
        primary.client.set("written", 1, ex=60)
        wait_until(lambda: primary.client.wait(1, 1000) == 1, "the replica's first confirmation")
        with (
            running_service(url_of(primary), new_namespace(), checkpoint, **settings) as service,
            httpx.Client(base_url=service.base_url, timeout=20) as client,
        ):
            _check_replicas(client, service, replica)


def _check_replicas(client: httpx.Client, service: RunningService, replica: Server) -> None:
    answer = client.post("/v1/responses", json=BACKGROUND)
    assert answer.headers[HEADER] == "replicas"
    job_id = answer.headers["x-request-id"].partition("_")[2]
    key = f"{service.settings.namespace}:{{p0}}:job:{job_id}"
    assert replica.client.hget(key, "durability") == b"replicas"
    process = replica._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        late = client.post("/v1/responses", json=BACKGROUND)
        assert late.status_code == 503
    finally:
        os.kill(process.pid, signal.SIGCONT)
    replica.kill()
    without = client.post("/v1/responses", json=BACKGROUND)
    assert without.status_code == 503
    assert "0 of 1 replicas" in without.json()["error"]["message"]


@pytest.mark.parametrize(
    ("durability", "options", "why"),
    [
        pytest.param(
            "fsync",
            ("--appendonly", "no"),
            "the server's append-only file is off.",
            marks=needs_waitaof,
        ),
        ("fsync", NO_WAITAOF, "the server is older than Redis 7.2"),
    ],
)
def test_a_setting_that_the_server_cannot_keep_is_refused_at_the_start(
    caplog: pytest.LogCaptureFixture, durability: str, options: tuple[str, ...], why: str
) -> None:
    with (
        servers(options) as (server,),
        running_frontend(url_of(server), new_namespace(), accept_durability=durability) as frontend,
    ):
        sentence = f"PENSTOCK_ACCEPT_DURABILITY cannot be {durability}: {why}"
        wait_until(lambda: sentence in str(logged_details(caplog)), "the sentence")
        ready = f"{frontend.base_url}/ready"
        wait_until(lambda: httpx.get(ready).status_code == 503, "no readiness")
        answer = httpx.post(f"{frontend.base_url}/generate", json={"prompt": "a"}, timeout=10)
        assert answer.status_code == 503


def test_a_setting_that_the_server_cannot_keep_yet_is_looked_at_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def closed() -> str | None:
        reason: str | None = httpx.get(f"{frontend.base_url}/ready", timeout=5).json()["closed"]
        return reason

    with (
        servers((), ()) as (primary, replica),
        running_frontend(
            url_of(primary), new_namespace(), accept_durability="replicas"
        ) as frontend,
    ):
        wait_until(lambda: "0 of 1 replicas" in (closed() or ""), "the sentence")
        wait_until(lambda: "0 of 1 replicas" in str(logged_details(caplog)), "the line of the log")
        answer = httpx.post(f"{frontend.base_url}/generate", json={"prompt": "a"}, timeout=10)
        assert answer.status_code == 503
        replica.client.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: closed() is None, "it to be looked at again")


def logged_details(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Returns what the lines of the log name beside their messages."""
    return [getattr(line, name, None) for line in caplog.records for name in ("detail", "reason")]
