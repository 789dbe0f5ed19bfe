"""A client of a launched service: streams with their times, what it says of itself, its Redis."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
import redis

from tests.support.launched import Launched
from tests.support.polling import wait_until

# Small intervals, so that a test sees a change soon after it happened.
CLOSE_LOOK = {"RUNNER": "echo", "BEAT_INTERVAL_MS": "100", "HEALTH_INTERVAL_S": "0.05"}
TIMEOUT_S = 60.0


def echo(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the echo runner answers."""
    return [prompt[i % len(prompt)] for i in range(num_tokens)]


@dataclass(frozen=True)
class Event:
    """One `data:` line of a stream; `payload` is None for [DONE]."""

    at_s: float
    payload: dict[str, Any] | None


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield Event(time.monotonic(), None if data == "[DONE]" else json.loads(data))


def token_ids_of(events: Sequence[Event]) -> list[int]:
    return [token for event in events if event.payload for token in event.payload["token_ids"]]


class ServiceClient:
    """A blocking client of one `Launched`; close it, or use it as a context manager."""

    def __init__(self, penstock: Launched) -> None:
        self.penstock = penstock
        self.base_url = penstock.base_url
        self.http = httpx.Client(base_url=penstock.base_url, timeout=TIMEOUT_S)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.http.close()

    @contextmanager
    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Iterator[Event]]:
        """Leaving the block closes the connection."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            yield events_of(response.iter_lines())

    def generate(self, prompt: str | Sequence[int], max_tokens: int) -> list[Event]:
        """A whole stream, with its [DONE]."""
        with self.stream("/generate", {"prompt": prompt, "max_tokens": max_tokens}) as events:
            return list(events)

    def health(self) -> dict[str, Any]:
        answer = self.http.get("/health")
        assert answer.status_code == 200
        return dict(answer.json())

    def worker(self) -> dict[str, Any]:
        """What the one worker said in a heartbeat that it sent after this call."""
        called_s = time.monotonic()

        def fresh() -> dict[str, Any] | None:
            asked_s = time.monotonic()
            health = self.health()
            if not health["workers"]:
                return None
            (worker,) = health["workers"]
            age_s = (health["age_ms"] + worker["beat_age_ms"]) / 1000
            return dict(worker) if asked_s - age_s > called_s else None

        return dict(self.until(fresh, "a heartbeat"))

    def until_idle(self) -> dict[str, Any]:
        """The worker's figures once it has no job and all its blocks are free."""

        def idle() -> dict[str, Any] | None:
            worker = self.worker()
            in_use = worker["total_blocks"] - worker["free_blocks"]
            busy = in_use or worker["jobs"] or worker["running"] or worker["waiting"]
            return None if busy else worker

        return dict(self.until(idle, "an idle worker"))

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
        """The condition's first true value; fails with `what`."""
        return wait_until(condition, what, timeout_s)

    def redis(self) -> redis.Redis:
        """The private server behind it."""
        found = re.search(r"unix://\S+", self.penstock.output)
        assert found is not None
        return redis.Redis.from_url(found[0])

    def pid_of(self, module: str) -> int:
        """The process that runs `python -m <module>`."""
        (pid,) = (pid for pid in self.penstock.descendants() if module.encode() in _arguments(pid))
        return pid


def launched_service(env: Mapping[str, str], *, is_forked: bool = True) -> Any:
    """A module's `service` fixture: the client of a whole Penstock with these settings."""

    @pytest.fixture(scope="module")
    def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
        directory = tmp_path_factory.mktemp("service")
        with (
            Launched(directory, env, is_forked=is_forked) as penstock,
            ServiceClient(penstock) as made,
        ):
            yield made

    return service


async def stream_all(base_url: str, bodies: Sequence[Mapping[str, Any]]) -> list[list[Event]]:
    """All at once, each to its end; POST /generate."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, limits=limits) as client:

        async def one(body: Mapping[str, Any]) -> list[Event]:
            async with client.stream("POST", "/generate", json=body) as response:
                assert response.status_code == 200, await response.aread()
                lines = [line async for line in response.aiter_lines()]
            return list(events_of(iter(lines)))

        return await asyncio.gather(*map(one, bodies))


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
