"""What real processes write into their logs: names, one line for an outage, no polling."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.launcher.redis_server import PrivateServer
from tests.support.redis_server import new_namespace
from tests.support.running_service import wait_until
from tests.support.service_processes import MODEL, FrontendProcess, process, worker_process
from tests.support.throttle import Throttle

REPOSITORY = Path(__file__).resolve().parents[3]
OUTAGE_S = 4.0  # longer than the pauses of all loops that try again

# What pages, probes and scrapers fetch again and again, and what pages are made of.
POLLED = (
    "/",
    "/dashboard",
    "/docs",
    "/health",
    "/metrics",
    "/metrics/deployment",
    "/openapi.json",
    "/ready",
    "/static/service.js",
    "/v1/dead-letters",
    "/v1/jobs",
    "/v1/jobs/JOB",
    "/v1/models",
    f"/v1/models/{MODEL}",
    "/version",
)


class Logged:
    """A frontend and a worker with a Redis of their own, and their logs in JSON."""

    def __init__(self, stack: ExitStack, checkpoint: Path, directory: Path) -> None:
        # A socket has a short path.
        self.redis = PrivateServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        url, namespace = self.redis.start(), new_namespace()
        stack.callback(self.redis.stop)
        self._log = directory / "worker.log"
        self.throttle = Throttle(directory / "throttle")
        stack.enter_context(
            worker_process(
                url,
                namespace,
                checkpoint,
                self._log,
                LOG_FORMAT="json",
                DRAIN_TIMEOUT_S="1",
                **self.throttle.env,
            )
        )
        settings = {"LOG_FORMAT": "json", "HEALTH_INTERVAL_S": "0.2"}
        self.frontend: FrontendProcess = stack.enter_context(process(url, namespace, **settings))
        wait_until(lambda: self.frontend.answers("/ready", 200), "readiness")
        self.client = stack.enter_context(httpx.Client(base_url=self.frontend.base_url, timeout=60))

    @property
    def of_worker(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    @property
    def of_frontend(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.frontend.lines]


@pytest.fixture
def logged(checkpoint: Path, tmp_path: Path) -> Iterator[Logged]:
    with ExitStack() as stack:
        yield Logged(stack, checkpoint, tmp_path)


@pytest.mark.promise(
    "Telemetry: lines name their process and worker, and the trace of their job; polled routes "
    "have none at INFO"
)
def test_lines_have_names_and_what_is_polled_has_none_at_info(logged: Logged) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    answer = logged.client.post(
        "/generate",
        json={"prompt": [5, 6, 7], "max_tokens": 3, "stream": False},
        headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
    )
    assert answer.status_code == 200
    name = answer.json()["id"]
    for path in POLLED:
        assert logged.client.get(path.replace("JOB", name)).status_code == 200, path
    last = {"prompt": [5, 6, 7], "max_tokens": 1, "stream": False}
    assert logged.client.post("/generate", json=last).status_code == 200

    def answered() -> list[dict[str, Any]]:
        return [line for line in logged.of_frontend if line["message"] == "request answered"]

    wait_until(lambda: len(answered()) >= 2, "the lines of both requests")
    assert {(line["method"], line["route"]) for line in answered()} == {("POST", "/generate")}
    wait_until(
        lambda: sum(line["message"] == "job ended" for line in logged.of_worker) == 2, "the ends"
    )
    workers = logged.client.get("/health").json()["workers"]
    for lines, process_name in ((logged.of_worker, "worker"), (logged.of_frontend, "frontend")):
        assert {line["process"] for line in lines} - {f"{process_name} engine"} == {process_name}
        assert all(isinstance(line["pid"], int) for line in lines)
    # A line about the environment comes before the worker has a name.
    named = [line for line in logged.of_worker if line["logger"] != "shared.settings"]
    assert {line["worker"] for line in named} == {worker["id"] for worker in workers}
    ended = [line for line in logged.of_worker if line["message"] == "job ended"]
    assert [line.get("trace_id") for line in ended] == [trace_id, None]
    assert [line.get("trace_id") for line in answered()] == [trace_id, None]
    assert name.endswith(ended[0]["job_id"])


def troubles(lines: list[dict[str, Any]]) -> list[str]:
    """Lines of WARNING and above, but those about names and the configuration of the server."""
    levels = ("warning", "error", "critical")
    return [
        f"{line['logger']} {line['message']}: {line.get('reason') or line.get('error')}"
        for line in lines
        if line["level"] in levels
        and line["logger"] != "shared.settings"
        and "CONFIG SET" not in line["message"]
    ]


def ends(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["message"] == "the store answers again"]


@pytest.mark.promise(
    "Telemetry: an outage of Redis is one line of each process when it begins and one when it is "
    "over"
)
def test_an_outage_of_redis_is_one_line_of_each_process_when_it_begins_and_one_when_it_is_over(
    logged: Logged,
) -> None:
    """While a stream runs, another job waits for it, and requests are refused."""
    logged.throttle.apply(5)
    body = {"prompt": [5, 6, 7], "max_tokens": 40}
    with logged.client.stream("POST", "/generate", json=body) as response:
        events = response.iter_lines()
        for _ in range(5):
            next(events)
        assert troubles(logged.of_worker) == troubles(logged.of_frontend) == []
        logged.redis.stop()
        begin_s = time.monotonic()
        refused = logged.client.post("/generate", json={**body, "stream": False})
        assert refused.status_code == 503
        while time.monotonic() < begin_s + OUTAGE_S:
            for path in ("/ready", "/v1/jobs"):
                assert logged.client.get(path).status_code == 503
            time.sleep(0.5)
        logged.redis.start()
        logged.throttle.release()
        rest = list(events)
    assert "data: [DONE]" in rest
    for lines_of in (lambda: logged.of_worker, lambda: logged.of_frontend):
        wait_until(lambda lines_of=lines_of: ends(lines_of()), "the line of the end")
    time.sleep(2.0)  # for lines that come late
    answered = [line for line in logged.of_frontend if line["message"] == "request answered"]
    assert {line["route"] for line in answered} == {"/generate"}  # what polls is refused as quietly
    for lines in (logged.of_worker, logged.of_frontend):
        assert len(troubles(lines)) == 1, troubles(lines)
        (end,) = ends(lines)
        assert end["num_suppressed"] >= 3
        assert OUTAGE_S / 2 < end["outage_s"] < time.monotonic() - begin_s
