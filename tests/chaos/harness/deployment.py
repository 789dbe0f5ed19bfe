"""A deployment under test: one Redis, frontends, workers, made whole again between scenarios."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shared.keys import HOME, Keys
from shared.transport.connect import RedisTransport, StorePolicy
from tests.chaos.harness.server import Server
from tests.support.launched import free_port
from tests.support.service_processes import FrontendProcess, Process, WorkerProcess
from tests.support.throttle import Throttle

NAMESPACE = "chaos"
NUM_WORKERS = 2
NUM_FRONTENDS = 2

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


class Deployment:
    """Processes outlive a test; whatever a test broke is replaced before the next one."""

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.model = checkpoint.name
        self.workers: list[WorkerProcess] = []
        self.frontends: list[FrontendProcess] = []
        self._directory = directory
        self._numbers = itertools.count()
        self._num_workers = NUM_WORKERS
        self._worker_changes: dict[str, object] = {}
        self._kinds: Sequence[Mapping[str, object]] = ({},)
        self._frontend_changes: dict[str, object] = {}
        self._rests = False
        self.server = Server(directory / "redis")
        self.redis_url = self.server.url  # where processes are sent to that are not told otherwise
        self.throttle = Throttle(directory / "throttle")

    def change_usual(
        self, *, num_workers: int, kinds: Sequence[Mapping[str, object]] = ({},), **worker: object
    ) -> None:
        """From now on these are the usual workers, in place of the default ones.

        There are as many of each kind: its settings come on top of the common ones.
        """
        self._num_workers = num_workers
        self._worker_changes = worker
        self._kinds = kinds

    def change_frontends(self, **changes: object) -> None:
        """From now on these are settings of the usual frontends too."""
        self._frontend_changes = changes

    def worker_settings(self, **changes: object) -> dict[str, str]:
        """Returns those of the next worker: of the kind of which there are fewest."""
        kinds = [self._settings_of(kind) for kind in self._kinds]
        present = [worker.settings.items() for worker in self.workers if worker.alive]
        counts = [sum(have >= settings.items() for have in present) for settings in kinds]
        return self._settings_of({**self._kinds[counts.index(min(counts))], **changes})

    def _settings_of(self, changes: Mapping[str, object]) -> dict[str, str]:
        model = {"MODEL": str(self.checkpoint), **self.throttle.env}
        changed = {**self._worker_changes, **changes}
        settings = WORKER_SETTINGS | model | {name: str(value) for name, value in changed.items()}
        if settings["RUNNER"] != "echo":
            del settings["ECHO_STEP_MS"]
        return settings

    def frontend_settings(self, **changes: object) -> dict[str, str]:
        changed = {**self._frontend_changes, **changes}
        return FRONTEND_SETTINGS | {name: str(value) for name, value in changed.items()}

    def urls(self) -> Sequence[str]:
        """Of the frontends that a client would be sent to."""
        return [frontend.base_url for frontend in self.frontends]

    def start_worker(self, redis_url: str | None = None, **changes: object) -> WorkerProcess:
        """One more; `ready` waits for it."""
        settings = self.worker_settings(**changes)
        worker = WorkerProcess(self._where(redis_url) | settings, self._log("worker"))
        self.workers.append(worker)
        return worker

    def start_frontend(self, redis_url: str | None = None, **changes: object) -> FrontendProcess:
        """One more; `ready` waits for it."""
        settings = {"PORT": str(free_port())} | self.frontend_settings(**changes)
        frontend = FrontendProcess(self._where(redis_url) | settings, self._log("frontend"))
        self.frontends.append(frontend)
        return frontend

    async def use_workers(
        self, count: int = NUM_WORKERS, redis_url: str | None = None, **changes: object
    ) -> list[WorkerProcess]:
        """These instead of the present ones, which leave in good order."""
        await self._leave(self.workers)
        for _ in range(count):
            self.start_worker(redis_url, **changes)
        await self.ready()
        return list(self.workers)

    async def use_frontends(
        self, count: int = NUM_FRONTENDS, redis_url: str | None = None, **changes: object
    ) -> list[FrontendProcess]:
        await self._leave(self.frontends)
        for _ in range(count):
            self.start_frontend(redis_url, **changes)
        await self.ready()
        return list(self.frontends)

    async def replaced(self, process: WorkerProcess | FrontendProcess) -> None:
        """One leaves in good order, for which another has come."""
        process.terminate()
        assert await process.ended() == 0, process.log
        process.close()
        others: list[Any] = self.workers if isinstance(process, WorkerProcess) else self.frontends
        others.remove(process)

    async def ready(self) -> None:
        """All are ready, and the frontends know the workers."""
        for worker in self.workers:
            await worker.ready()
        for frontend in self.frontends:
            await frontend.sees(self.worker_ids())

    async def heal(self) -> None:
        """As many workers and frontends as usual, with the usual settings, all ready."""
        if self._rests:
            self.server.start()
            self._rests = False
        where = self._where(None)
        of_a_kind = self._num_workers // len(self._kinds)
        surplus: set[Process] = set(self.workers)
        for kind in self._kinds:
            usual = where | self._settings_of(kind)
            surplus &= set(self._surplus(self.workers, usual, of_a_kind))
        await self._leave(self.workers, [*surplus])
        usual = where | self.frontend_settings()
        await self._leave(self.frontends, self._surplus(self.frontends, usual, NUM_FRONTENDS))
        while len(self.workers) < self._num_workers:
            self.start_worker()
        while len(self.frontends) < NUM_FRONTENDS:
            self.start_frontend()
        await self.ready()

    def worker_ids(self) -> set[str]:
        return {worker.worker_id for worker in self.workers if worker.alive}

    @asynccontextmanager
    async def transport(self, partition: int = HOME) -> AsyncIterator[RedisTransport]:
        opened = RedisTransport(self.server.url, Keys(NAMESPACE, partition), StorePolicy())
        try:
            yield opened
        finally:
            await opened.aclose()

    async def leave(self) -> None:
        """All workers and frontends end in good order."""
        await self._leave(self.workers)
        await self._leave(self.frontends)

    def reset(self) -> None:
        """After a failed test: nothing of it is left."""
        self.close()
        shutil.rmtree(self._directory / "redis", ignore_errors=True)
        self.server = Server(self._directory / "redis")
        self._rests = False
        self.redis_url = self.server.url

    def rest(self) -> None:
        """Ends all processes until the next `heal`: idle ones take a good part of a core."""
        self.close()
        self._rests = True

    def close(self) -> None:
        for process in (*self.workers, *self.frontends):
            process.close()
        self.workers.clear()
        self.frontends.clear()
        self.server.stop()

    def _where(self, redis_url: str | None) -> dict[str, str]:
        return {"REDIS_URL": redis_url or self.redis_url, "NAMESPACE": NAMESPACE}

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}{next(self._numbers)}.log"

    @staticmethod
    def _surplus(processes: Sequence[Process], usual: dict[str, str], count: int) -> list[Process]:
        kept = [
            process
            for process in processes
            if process.alive
            and not process.is_frozen
            and process.settings.items() >= usual.items()
            and len(process.settings) <= len(usual) + 1  # a frontend has its port
        ][:count]
        return [process for process in processes if process not in kept]

    @staticmethod
    async def _leave(
        processes: list[WorkerProcess] | list[FrontendProcess],
        leaving: Sequence[Process] | None = None,
    ) -> None:
        going = list(processes if leaving is None else leaving)
        for process in going:
            if process.is_frozen:
                process.thaw()
            if process.alive:
                process.terminate()
        for process in going:
            await process.ended()
            process.close()
        processes[:] = [process for process in processes if process not in going]  # type: ignore[misc]
