"""Frontends and workers as the processes that they are in production, and faults for them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from shared.process import dying_with_this_process
from tests.support import document_check
from tests.support.forked import ForkedPopen
from tests.support.polling import PATIENCE_S, until, wait_until
from tests.support.throttle import FAULTS
from tests.support.variables import with_prefix

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "tiny"  # as workers serve their checkpoint
READY = "worker.service the worker is ready "  # in the log


class Process:
    """`python -m <module>` in a session of its own. Its output goes to a file: `log_path`, or one
    without a name."""

    module = ""

    def __init__(
        self,
        settings: Mapping[str, object],
        log_path: Path | None = None,
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.settings = {name: str(value) for name, value in settings.items()}
        self._log: Any = tempfile.TemporaryFile() if log_path is None else log_path.open("w+b")  # noqa: SIM115
        self._last_log = ""
        self.popen = ForkedPopen(
            [sys.executable, "-m", self.module],
            cwd=REPOSITORY,
            env={
                **{name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ},
                "PYTHONPATH": f"{FAULTS}{os.pathsep}{REPOSITORY}",
                "OMP_NUM_THREADS": "1",
                **document_check.environment(),
                **with_prefix({"LOG_FORMAT": "text", **self.settings}),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=dying_with_this_process(signal.SIGKILL),
        )
        self.is_frozen = False

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def log(self) -> str:
        if self._log.closed:
            return self._last_log
        fd = self._log.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode()

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """kill -9, and no more of it."""
        self.popen.kill()
        self.popen.wait()

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)
        self.is_frozen = False

    async def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit status."""
        await until(lambda: not self.alive, f"the end of {self.module}", timeout_s)
        return self.popen.wait()

    def close(self) -> None:
        """Ends it in any state. Idempotent."""
        if self.alive:
            self.kill()
        if not self._log.closed:
            self._last_log = self.log
            self._log.close()


class WorkerProcess(Process):
    """A worker and its engine."""

    module = "worker"

    @property
    def worker_id(self) -> str:
        match = re.search(READY + r".*?worker_id=(\S+)", self.log)
        assert match is not None, self.log
        return match.group(1)

    async def ready(self) -> WorkerProcess:
        patience_s = float(self.settings.get("LOAD_TIMEOUT_S", PATIENCE_S))
        await until(lambda: READY in self.log or not self.alive, "a worker", patience_s)
        assert self.alive, self.log
        return self

    def engine_pids(self) -> list[int]:
        """Its living children: the engine processes, of which the newest comes last."""
        children: list[int] = []
        with contextlib.suppress(FileNotFoundError):
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
            children = [int(pid) for pid in text.split()]
        return children

    def engine_pid(self) -> int:
        """Of the engine process that it has now; AssertionError while it has none."""
        children = self.engine_pids()
        assert children, "no engine"
        return children[-1]

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)

    def freeze_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGSTOP)

    def freeze(self) -> None:
        engine = self.engine_pid()
        super().freeze()
        os.kill(engine, signal.SIGSTOP)

    def thaw(self) -> None:
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(self.engine_pid(), signal.SIGCONT)
        super().thaw()


class FrontendProcess(Process):
    """A frontend: on PORT, or on a port that the system gives it."""

    module = "api"

    def __init__(self, settings: Mapping[str, object], log_path: Path | None = None) -> None:
        super().__init__({"PORT": "0", **settings}, log_path)
        self.base_url = f"http://127.0.0.1:{self.settings['PORT']}"

    @property
    def lines(self) -> list[str]:
        return self.log.splitlines(keepends=True)

    def started(self) -> bool:
        """Whether it said which port it has."""
        found = re.search(r"running on (http://[0-9.:]+)", self.log)
        if found:
            self.base_url = found[1]
        assert found or self.alive, self.log
        return bool(found)

    def answers(self, path: str, status: int) -> bool:
        try:
            return httpx.get(self.base_url + path, timeout=5).status_code == status
        except httpx.TransportError:
            return False

    async def status(self, path: str) -> int | None:
        """Of a GET; None when nobody answers."""
        async with self._client() as client:
            try:
                return (await client.get(path)).status_code
            except httpx.TransportError:
                return None

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

    async def ready(self, timeout_s: float = PATIENCE_S) -> FrontendProcess:
        async def is_ready() -> bool:
            assert self.alive, self.log
            return await self.status("/ready") == 200

        await until(is_ready, "a frontend", timeout_s)
        return self

    def _client(self) -> httpx.AsyncClient:
        # Certificates are of no use here, and loading them takes from what is being started.
        return httpx.AsyncClient(base_url=self.base_url, timeout=5, verify=False)

    def num_descriptors(self) -> int:
        """How many it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def process(redis: str, namespace: str, **settings: str) -> Iterator[FrontendProcess]:
    """A frontend that answers."""
    made = FrontendProcess({"REDIS_URL": redis, "NAMESPACE": namespace, **settings})
    try:
        wait_until(made.started, "the frontend's start")
        wait_until(lambda: made.answers("/health", 200), "its first answer")
        yield made
    finally:
        made.close()


@contextmanager
def worker_process(
    redis: str, namespace: str, checkpoint: Path, log: Path, **settings: object
) -> Iterator[WorkerProcess]:
    """A worker that serves `checkpoint` as MODEL; its engine echoes by default. It writes `log`."""
    worker = WorkerProcess(
        {
            "REDIS_URL": redis,
            "NAMESPACE": namespace,
            "MODEL": checkpoint,
            "SERVED_MODEL_NAME": MODEL,
            "RUNNER": "echo",
            **settings,
        },
        log,
    )
    try:
        yield worker
    finally:
        worker.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.popen.wait(30)
        worker.close()


@contextmanager
def service_processes(
    redis: str,
    namespace: str,
    checkpoint: Path,
    directory: Path,
    *,
    frontend_settings: Mapping[str, str] | None = None,
    **settings: str,
) -> Iterator[FrontendProcess]:
    """A worker with `settings` and a frontend, which serve when this is entered. The worker's log
    is in `directory`, and in the error of one that never serves."""
    with (
        worker_process(redis, namespace, checkpoint, directory / "log", **settings) as worker,
        process(redis, namespace, **(frontend_settings or {})) as frontend,
    ):
        try:
            wait_until(lambda: frontend.answers("/ready", 200), "readiness")
        except AssertionError:
            raise AssertionError(worker.log) from None
        yield frontend
