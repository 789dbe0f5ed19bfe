"""The processes under test, and what can be done to them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import httpx

from shared.process import dying_with_this_process
from tests.chaos.harness.polling import PATIENCE_S, until
from tests.support.forked import ForkedPopen
from tests.support.launched import free_port
from tests.support.throttle import FAULTS
from tests.support.variables import with_prefix

ROOT = Path(__file__).resolve().parents[3]

READY = "worker.service the worker is ready "  # in the log

WORKER_SETTINGS = {
    "RUNNER": "echo",
    "ECHO_STEP_MS": "5",
    "MAX_NUM_SEQS": "16",
    "NUM_KV_BLOCKS": "2048",
    "LEASE_MS": "3000",  # a busy machine holds a process up for a good part of a second
    "BEAT_INTERVAL_MS": "200",
    "STALL_LIMIT_S": "20",  # where nothing hangs, nobody is to be taken for hanging
    "ENGINE_RESTARTS": "100",
    "LOAD_TIMEOUT_S": "60",  # whoever loads torch first reads it from a disk
    "DRAIN_TIMEOUT_S": "0.3",
    "MAX_UNFLUSHED_TOKENS": "64",
}
FRONTEND_SETTINGS = {
    "FRONTEND_LEASE_MS": "5000",  # an unnoticed pause of the server and a late heartbeat fit in
    "KEEPALIVE_S": "0.5",
    "SHUTDOWN_TIMEOUT_S": "1",
    "HEALTH_INTERVAL_S": "0.2",
    "REQUEST_TIMEOUT_S": "60",
    "OUTAGE_S": "30",
}


class Process:
    """`python -m <module>` in a session of its own, its words in a file."""

    module = ""

    def __init__(self, log_path: Path, settings: dict[str, str]) -> None:
        self.settings = settings
        self.log_path = log_path
        self._log: IO[bytes] = log_path.open("wb")
        self._process = ForkedPopen(
            [sys.executable, "-m", self.module],
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{FAULTS}{os.pathsep}{ROOT}",
                "OMP_NUM_THREADS": "1",
                **with_prefix({"LOG_FORMAT": "text", **settings}),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=dying_with_this_process(signal.SIGKILL),
        )
        self.is_frozen = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """kill -9, and no more of it."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.is_frozen = False

    async def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit status."""
        await until(lambda: not self.alive, f"the end of {self.module}", timeout_s)
        return self._process.wait()

    def close(self) -> None:
        """Ends it in any state. Idempotent."""
        if self.alive:
            self.kill()
        self._log.close()


class WorkerProcess(Process):
    """A worker and its engine."""

    module = "worker"

    @property
    def worker_id(self) -> str:
        match = re.search(READY + r".*?worker_id=(\S+)", self.log)
        assert match is not None, self.log
        return match.group(1)

    def engine_pid(self) -> int:
        """Of the engine process that it has now; AssertionError while it has none."""
        children: list[int] = []
        with contextlib.suppress(FileNotFoundError):
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
            children = [int(pid) for pid in text.split()]
        assert children, "no engine"
        return children[-1]

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)

    def freeze_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGSTOP)

    async def ready(self) -> WorkerProcess:
        patience_s = float(self.settings["LOAD_TIMEOUT_S"])
        await until(lambda: READY in self.log or not self.alive, "a worker", patience_s)
        assert self.alive, self.log
        return self

    def freeze(self) -> None:
        engine = self.engine_pid()
        super().freeze()
        os.kill(engine, signal.SIGSTOP)

    def thaw(self) -> None:
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(self.engine_pid(), signal.SIGCONT)
        super().thaw()


class FrontendProcess(Process):
    """A frontend on a port of its own."""

    module = "api"

    def __init__(self, log_path: Path, settings: dict[str, str]) -> None:
        self.port = int(settings.get("PORT") or free_port())
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(log_path, {**settings, "PORT": str(self.port)})

    async def answers(self, path: str) -> int | None:
        """The status of a GET; None when nobody answers."""
        async with self._client() as client:
            return await self._status(client, path)

    async def sees(self, worker_ids: set[str]) -> FrontendProcess:
        """Returns when its picture shows exactly these workers and it takes work."""
        async with self._client() as client:

            async def is_up_to_date() -> bool:
                assert self.alive, self.log
                try:
                    health = (await client.get("/health")).json()
                except httpx.TransportError:
                    return False
                seen = {worker["id"] for worker in health["workers"]}
                assert seen == worker_ids, f"it sees {seen}"
                return True

            await until(is_up_to_date, f"a frontend to see {worker_ids}")
        return await self.ready() if worker_ids else self

    async def ready(self) -> FrontendProcess:
        async with self._client() as client:

            async def is_ready() -> bool:
                assert self.alive, self.log
                return await self._status(client, "/ready") == 200

            await until(is_ready, "a frontend")
        return self

    def _client(self) -> httpx.AsyncClient:
        # Certificates are of no use here, and loading them takes from what is being started.
        return httpx.AsyncClient(base_url=self.url, timeout=5, verify=False)

    @staticmethod
    async def _status(client: httpx.AsyncClient, path: str) -> int | None:
        try:
            return (await client.get(path)).status_code
        except httpx.TransportError:
            return None

    def num_descriptors(self) -> int:
        """How many it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
