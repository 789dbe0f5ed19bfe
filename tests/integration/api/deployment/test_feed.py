"""The dashboard's stream: a snapshot, then what is different, read once for all who look."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from httpx_sse import EventSource, connect_sse

from api.deployment import feed as feed_module
from api.deployment.feed import DeploymentFeed
from shared.transport.ports.job_search import JobSearch
from tests.support.keys import Keys
from tests.support.redis_server import new_namespace
from tests.support.running_service import RunningService, running_frontend, wait_until
from tests.support.service_fixtures import module_service

PATH = "/v1/deployment/stream"
BODY = {"prompt": "a gate and a wheel", "max_tokens": 8, "stream": False}
PATIENCE_S = 30.0


class Watcher:
    """What a dashboard knows of the deployment."""

    def __init__(self, source: EventSource) -> None:
        self._events = source.iter_sse()
        self.objects: dict[str, Any] = {}
        self.lists: dict[str, dict[str, Any]] = {}
        self.kinds: list[str] = []

    def look(self) -> None:
        event = next(self._events)
        told = json.loads(event.data)
        lists = told.pop("lists")
        if event.event == "snapshot":
            self.objects, self.lists = {}, {}
        self.objects |= told
        for name, part in lists.items():
            known = {**self.lists.get(name, {}), **part["rows"]}
            self.lists[name] = {i: known[i] for i in part.get("ids", self.lists.get(name, {}))}
        self.kinds.append(event.event)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return list(self.lists.get(name, {}).values())

    def until(self, condition: Any, what: str) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_s, f"never shown: {what}"
            self.look()


@contextlib.contextmanager
def watching(client: httpx.Client, **query: str) -> Iterator[Watcher]:
    with connect_sse(client, "GET", PATH, params=query) as source:
        assert source.response.status_code == 200, source.response.read()
        watcher = Watcher(source)
        watcher.look()
        yield watcher


def test_a_job_is_shown_from_the_queue_to_its_end(
    client: httpx.Client, service: RunningService
) -> None:
    service.park()
    with watching(client) as watcher:
        assert watcher.kinds == ["snapshot"]
        (worker,) = watcher.rows("workers")
        assert worker["id"] == service.worker.worker_id
        body = {**BODY, "stream": True}
        with client.stream("POST", "/generate", json=body) as answer:
            name = answer.headers["x-request-id"]

            def status() -> str | None:
                return next((j["status"] for j in watcher.rows("jobs") if j["id"] == name), None)

            watcher.until(lambda: status() == "queued", "the queued job")
            service.script.pulls = True
            watcher.until(lambda: status() == "finished", "its end")
            answer.read()
        job = next(j for j in watcher.rows("jobs") if j["id"] == name)
        assert job == client.get(f"/v1/jobs/{name}").json()
        assert set(watcher.kinds[1:]) == {"change"}
        watcher.until(lambda: watcher.rows("frontends"), "this frontend")
        (frontend,) = watcher.rows("frontends")
        assert frontend["id"] == service.app.state.services.frontend_id
        assert frontend["port"] == service.settings.port
        assert isinstance(frontend["pid"], int)
        watcher.until(lambda: watcher.rows("frontends")[0]["dashboards"] == 1, "its dashboard")
        (tenant,) = watcher.rows("tenants")
        assert (tenant["tenant"], tenant["queued"], tenant["running"]) == ("default", 0, 0)
        assert watcher.objects["service"]["status"] == "ok"

        def first_tokens() -> list[Any]:
            slots = watcher.rows("history")
            return [slot for slot in slots if slot["ttft_p50_ms"] is not None]

        watcher.until(first_tokens, "its first token in the history")
        watcher.until(
            lambda: any(slot["queued"] for slot in watcher.rows("history")), "the queue's depth"
        )


def test_one_job_is_followed_to_its_end(client: httpx.Client, service: RunningService) -> None:
    service.script.step_s = 0.1
    body = {**BODY, "stream": True, "max_tokens": 400}
    with client.stream("POST", "/generate", json=body) as answer:
        name = answer.headers["x-request-id"]
        with watching(client, job=name) as watcher:
            assert watcher.lists == {}
            watcher.until(lambda: watcher.objects["job"]["status"] == "running", "it runs")
            client.delete(f"/v1/jobs/{name}")
            watcher.until(lambda: watcher.objects["job"]["status"] == "cancelled", "its end")
            assert watcher.objects["job"] == client.get(f"/v1/jobs/{name}").json()
            assert watcher.objects["dead_letter"] is None
        answer.read()
    assert client.get(PATH, params={"job": "gen-0-nothing"}).status_code == 404


def test_jobs_of_one_state_are_listed(client: httpx.Client) -> None:
    client.post("/generate", json=BODY)
    with watching(client, state="failed") as watcher:
        assert all(job["status"] == "failed" for job in watcher.rows("jobs"))
    with watching(client, state="finished") as watcher:
        assert watcher.rows("jobs")
    for query in ("state=done", "state=", "x=1", "job="):
        refused = client.get(f"{PATH}?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == query.partition("=")[0]


def reads_of(service: RunningService) -> int:
    """How many times the lists have been read from the server by anybody."""
    redis: Any = service.transport.connections.commands
    stats = service.call(redis.info("commandstats"))
    names = ("cmdstat_zrevrange", "cmdstat_zrevrangebyscore")
    return sum(int(stats.get(name, {}).get("calls", 0)) for name in names)


def reads_in_rounds(service: RunningService, client: httpx.Client, num_watchers: int) -> float:
    """How many reads a round costs while so many look."""
    with contextlib.ExitStack() as stack:
        watchers = [stack.enter_context(watching(client)) for _ in range(num_watchers)]
        before, seen = reads_of(service), len(watchers[0].kinds)
        for _ in range(4):
            watchers[0].look()
        return (reads_of(service) - before) / (len(watchers[0].kinds) - seen)


@pytest.mark.promise(
    "Dashboard: the store is read once however many look, and not at all while no one does; a page "
    "has one stream and asks for no list"
)
def test_the_store_is_read_once_however_many_look(
    client: httpx.Client, service: RunningService
) -> None:
    alone = reads_in_rounds(service, client, 1)
    together = reads_in_rounds(service, client, 12)
    assert alone > 0
    assert together < 3 * alone


def deserted(service: RunningService) -> DeploymentFeed:
    """The feed, once those of earlier tests have been noticed to have left."""
    feed: DeploymentFeed = service.app.state.services.feed
    wait_until(lambda: feed.num_watchers == 0, "the watchers to leave")
    return feed


def test_while_nobody_looks_nothing_is_read(client: httpx.Client, service: RunningService) -> None:
    feed = deserted(service)
    with watching(client):
        assert feed.num_watchers == 1
    deserted(service)
    reading = feed._reading
    assert reading is not None
    wait_until(reading.done, "the end of the reading")
    with watching(client):
        assert feed._reading is not reading


def test_too_many_dashboards_are_refused(
    client: httpx.Client, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deserted(service).watchers, "limit", 1)
    with watching(client):
        refused = client.get(PATH)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_overloaded"
        assert refused.headers["retry-after"]
    wait_until(lambda: _can_watch(client), "room again")


def _can_watch(client: httpx.Client) -> bool:
    with client.stream("GET", PATH) as response:
        return response.status_code == 200


def test_a_shutdown_ends_the_streams_and_is_not_held_up(redis_url: str) -> None:
    with (
        running_frontend(redis_url, new_namespace()) as frontend,
        httpx.Client(base_url=frontend.base_url, timeout=30) as client,
    ):
        with watching(client) as watcher:
            close = frontend.app.state.open_requests.close
            frontend.loop.call_soon_threadsafe(close, "This frontend is shutting down.")
            with pytest.raises(StopIteration):
                watcher.until(lambda: False, "the end of the stream")
        assert client.get(PATH).json()["error"]["code"] == "frontend_draining"


def test_a_store_that_cannot_be_read_is_told(
    client: httpx.Client, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = service.app.state.parts[JobSearch]

    async def away(*arguments: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        raise feed_module.TransportError("away")

    with watching(client) as watcher:
        assert watcher.objects["service"]["status"] == "ok"
        shown = watcher.rows("frontends")
        monkeypatch.setattr(search, "find", away)
        watcher.until(lambda: watcher.objects["service"]["status"] == "degraded", "the outage")
        assert watcher.rows("frontends") == shown  # the last known
        monkeypatch.undo()
        watcher.until(lambda: watcher.objects["service"]["status"] == "ok", "its end")


@pytest.mark.timeout(60)
def test_a_round_that_took_long_is_not_waited_for_without_end(
    client: httpx.Client, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times a round that waited for a slow server would be minutes."""
    monkeypatch.setattr(feed_module, "REST", 1e6)
    monkeypatch.setattr(feed_module, "MAX_REST_S", 0.2)
    deserted(service)
    with watching(client) as watcher:
        for _ in range(3):
            watcher.look()


KEYS = Keys(acme="max_jobs=7", other="", ops="operator")
keyed = module_service(api_keys=KEYS.lines)


@pytest.mark.promise("Dashboard: a key shows its tenant's own, an operator's key all")
def test_a_key_shows_its_tenants_own_and_an_operators_key_all(keyed: RunningService) -> None:
    acme, other, operator = (KEYS.client(keyed.base_url, name) for name in KEYS)
    with acme, other, operator:
        name = acme.post("/generate", json=BODY).json()["id"]
        with watching(acme) as watcher:
            assert [job["id"] for job in watcher.rows("jobs")] == [name]
            (tenant,) = watcher.rows("tenants")
            assert (tenant["tenant"], tenant["limits"]["max_jobs"]) == ("acme", 7)
        with watching(other) as watcher:
            assert watcher.rows("jobs") == []
            assert [tenant["tenant"] for tenant in watcher.rows("tenants")] == ["other"]
        assert other.get(PATH, params={"job": name}).status_code == 404
        with watching(operator) as watcher:
            assert [job["id"] for job in watcher.rows("jobs")] == [name]
            tenants = {tenant["tenant"] for tenant in watcher.rows("tenants")}
            assert tenants == {"acme", "other", "ops"}
        with watching(operator, job=name) as watcher:
            assert watcher.objects["job"]["tenant"] == "acme"
    anonymous = httpx.get(f"{keyed.base_url}{PATH}")
    assert (anonymous.status_code, anonymous.json()["error"]["code"]) == (401, "invalid_api_key")
