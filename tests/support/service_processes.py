"""Frontends and workers as the processes that they are in production."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from shared.process import dying_with_this_process
from tests.support import document_check
from tests.support.forked import ForkedPopen
from tests.support.redis_topologies import until
from tests.support.variables import with_prefix

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "tiny"  # as workers serve their checkpoint
READY_S = 60.0


class Process:
    """A frontend in a process of its own."""

    def __init__(self, redis: str, namespace: str, **settings: str) -> None:
        self.base_url = ""
        self.lines: list[str] = []
        self.popen = ForkedPopen(
            [sys.executable, "-m", "api"],
            cwd=REPOSITORY,
            env={
                "PATH": os.environ["PATH"],
                **document_check.environment(),
                **with_prefix(
                    {"REDIS_URL": redis, "NAMESPACE": namespace, "PORT": "0", **settings}
                ),
            },
            stderr=subprocess.PIPE,
            preexec_fn=dying_with_this_process(signal.SIGKILL),
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def started(self) -> bool:
        """Whether it said which port the system gave it."""
        found = re.search(r"running on (http://[0-9.:]+)", "".join(self.lines))
        if found:
            self.base_url = found[1]
        assert found or self.popen.poll() is None, "".join(self.lines)
        return bool(found)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(60)
        self._reader.join(20)
        assert self.popen.stderr is not None
        self.popen.stderr.close()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)

    def answers(self, path: str, status: int) -> bool:
        try:
            return httpx.get(self.base_url + path, timeout=5).status_code == status
        except httpx.TransportError:
            return False


@contextmanager
def process(redis: str, namespace: str, **settings: str) -> Iterator[Process]:
    made = Process(redis, namespace, **settings)
    try:
        until(made.started, "the frontend's start", READY_S)
        until(lambda: made.answers("/health", 200), "its first answer", READY_S)
        yield made
    finally:
        made.end()


@contextmanager
def worker_process(
    redis: str,
    namespace: str,
    checkpoint: Path,
    log: Path,
    **settings: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that serves `checkpoint` as MODEL; its engine echoes by default. It writes `log`."""
    with log.open("wb") as output:
        popen = ForkedPopen(
            [sys.executable, "-m", "worker"],
            cwd=REPOSITORY,
            env=with_prefix(
                {
                    "PATH": os.environ["PATH"],
                    "OMP_NUM_THREADS": "1",
                    "REDIS_URL": redis,
                    "NAMESPACE": namespace,
                    "MODEL": str(checkpoint),
                    "SERVED_MODEL_NAME": MODEL,
                    "RUNNER": "echo",
                    **settings,
                }
            ),
            stdout=output,
            stderr=output,
            preexec_fn=dying_with_this_process(signal.SIGKILL),
        )
        try:
            yield popen
        finally:
            popen.send_signal(signal.SIGTERM)
            try:
                popen.wait(30)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait(10)


@contextmanager
def service_processes(
    redis: str,
    namespace: str,
    checkpoint: Path,
    directory: Path,
    *,
    frontend_settings: Mapping[str, str] | None = None,
    **settings: str,
) -> Iterator[Process]:
    """A worker with `settings` and a frontend, which serve when this is entered. The worker's log
    is in `directory`, and in the error of one that never serves."""
    log = directory / "log"
    with (
        worker_process(redis, namespace, checkpoint, log, **settings),
        process(redis, namespace, **(frontend_settings or {})) as frontend,
    ):
        try:
            until(lambda: frontend.answers("/ready", 200), "readiness", READY_S)
        except AssertionError:
            raise AssertionError(log.read_text()) from None
        yield frontend
