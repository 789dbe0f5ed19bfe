"""Random faults for a long round, each followed by what a supervisor would do about it."""

from __future__ import annotations

import asyncio
import random
import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.proxy import Proxy
from tests.support.service_processes import FrontendProcess, Process, WorkerProcess
from tests.support.settable_clock import SettableClock

ProcessT = TypeVar("ProcessT", bound=Process)

AT_A_TIME = 3
MIN_REST_S, MAX_REST_S = 0.2, 1.5
FREEZE_S = (0.5, 4.0)  # leases are 2 s: some freezes outlast them, some do not
READY_S = 300.0  # a frontend that starts amid other faults, on a busy machine
OUTAGE_S = (0.0, 3.0)
CLOCK_S = 25.0

WEIGHTS = {
    "kill a worker": 4,
    "end a worker": 3,
    "freeze a worker": 3,
    "kill all workers": 2,
    "kill an engine": 3,
    "freeze an engine": 1,
    "kill a frontend": 3,
    "end a frontend": 2,
    "freeze a frontend": 1,
    "no descriptors for a frontend": 1,
    "cut all subscribers": 3,
    "cut all command connections": 2,
    "reset all connections": 2,
    "forget the scripts": 2,
    "no disk for redis": 2,
    "set the clock of redis": 2,
    "restart redis": 1,
    "kill redis": 1,
}


@contextmanager
def limited(pid: int, limit: int, value: int) -> Iterator[None]:
    """A process may use no more of something than `value`, until the block is left."""
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (value, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # another fault ended it
            resource.prlimit(pid, limit, before)


class RandomFaults:
    """Breaks things until cancelled, several at a time; `done` counts what it broke."""

    def __init__(
        self, deployment: Deployment, proxy: Proxy, clock: SettableClock, rng: random.Random
    ) -> None:
        """`proxy`: what processes reach their server through, by TCP; `clock`: the server's."""
        self.done: Counter[str] = Counter()
        self._deployment = deployment
        self._proxy = proxy
        self._clock = clock
        self._rng = rng
        self._victims: set[Process] = set()
        self._server_is_ours = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled, which waits for the faults in progress."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(self._break_things())

    async def _break_things(self) -> None:
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        while True:
            await asyncio.sleep(self._rng.uniform(MIN_REST_S, MAX_REST_S))
            (name,) = self._rng.choices(names, weights)
            fault = asyncio.create_task(self._faults()[name]())
            try:
                await asyncio.shield(fault)
            except asyncio.CancelledError:
                await fault
                raise
            finally:
                self.done[name] += 1

    @contextmanager
    def _victim(self, processes: Sequence[ProcessT]) -> Iterator[ProcessT | None]:
        """One that nothing else befalls now; None rather than the last that is well."""
        well = [process for process in processes if process not in self._victims]
        victim = self._rng.choice(well) if len(well) > 1 else None
        if victim is None:
            yield None
            return
        self._victims.add(victim)
        try:
            yield victim
        finally:
            self._victims.discard(victim)

    def _faults(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        return {
            "kill a worker": lambda: self._replace_worker(WorkerProcess.kill),
            "end a worker": lambda: self._replace_worker(WorkerProcess.terminate),
            "freeze a worker": lambda: self._freeze(self._deployment.workers),
            "kill all workers": self._kill_all_workers,
            "kill an engine": lambda: self._hurt_engine(WorkerProcess.kill_engine),
            "freeze an engine": lambda: self._hurt_engine(WorkerProcess.freeze_engine),
            "kill a frontend": lambda: self._replace_frontend(FrontendProcess.kill),
            "end a frontend": lambda: self._replace_frontend(FrontendProcess.terminate),
            "freeze a frontend": lambda: self._freeze(self._deployment.frontends),
            "no descriptors for a frontend": self._exhaust_descriptors,
            "cut all subscribers": lambda: self._tell_server(
                lambda client: client.client_kill_filter(_type="pubsub")
            ),
            "cut all command connections": lambda: self._tell_server(
                lambda client: client.client_kill_filter(_type="normal", skipme=True)
            ),
            "reset all connections": self._reset_connections,
            "forget the scripts": lambda: self._tell_server(lambda client: client.script_flush()),
            "no disk for redis": self._fill_disk,
            "set the clock of redis": self._set_clock,
            "restart redis": lambda: self._restart_server(self._deployment.server.stop),
            "kill redis": lambda: self._restart_server(self._deployment.server.kill),
        }

    async def _replace_worker(self, end: Callable[[WorkerProcess], None]) -> None:
        with self._victim(self._deployment.workers) as victim:
            if victim is None:
                return
            end(victim)
            await victim.ended()
            self._deployment.workers.remove(victim)
            victim.close()
        await asyncio.sleep(self._rng.uniform(0, 1))
        await self._left_alone_until_ready(self._deployment.start_worker())

    async def _replace_frontend(self, end: Callable[[FrontendProcess], None]) -> None:
        with self._victim(self._deployment.frontends) as victim:
            if victim is None:
                return
            end(victim)
            await victim.ended()
            self._deployment.frontends.remove(victim)
            victim.close()
        await self._left_alone_until_ready(self._deployment.start_frontend())

    async def _kill_all_workers(self) -> None:
        """Those that are well; the last one among them. New ones come after a while."""
        victims = [worker for worker in self._deployment.workers if worker not in self._victims]
        self._victims.update(victims)
        for victim in victims:
            victim.kill()
            self._deployment.workers.remove(victim)
            victim.close()
        await asyncio.sleep(self._rng.uniform(0, 3))
        started = [self._deployment.start_worker() for _ in victims]
        self._victims.update(started)
        self._victims.difference_update(victims)
        for worker in started:
            await self._left_alone_until_ready(worker)

    async def _exhaust_descriptors(self) -> None:
        """EMFILE for whatever it opens or accepts."""
        with self._victim(self._deployment.frontends) as victim:
            if victim is None:
                return
            with limited(victim.pid, resource.RLIMIT_NOFILE, victim.num_descriptors()):
                await asyncio.sleep(self._rng.uniform(*OUTAGE_S))

    async def _fill_disk(self) -> None:
        """Writes to its file fail: it refuses commands that write (MISCONF), and says why."""
        async with self._server_is_ours:
            server = self._deployment.server
            with limited(server.pid, resource.RLIMIT_FSIZE, server.file_size()):
                await asyncio.sleep(self._rng.uniform(*OUTAGE_S))

    async def _left_alone_until_ready(self, process: WorkerProcess | FrontendProcess) -> None:
        self._victims.add(process)
        if isinstance(process, FrontendProcess):
            await process.ready(READY_S)
        else:
            await process.ready()
        self._victims.discard(process)

    async def _freeze(self, processes: Sequence[ProcessT]) -> None:
        with self._victim(processes) as victim:
            if victim is None:
                return
            try:
                victim.freeze()
            except AssertionError:
                return  # its engine is just coming back
            await asyncio.sleep(self._rng.uniform(*FREEZE_S))
            victim.thaw()

    async def _hurt_engine(self, hurt: Callable[[WorkerProcess], None]) -> None:
        with self._victim(self._deployment.workers) as victim:
            if victim is None:
                return
            try:
                hurt(victim)
            except AssertionError:
                return  # its engine is just coming back

    async def _tell_server(self, tell: Callable[[Any], Awaitable[object]]) -> None:
        async with self._server_is_ours:
            client = redis.asyncio.Redis.from_url(self._deployment.server.url)
            try:
                await tell(client)
            except RedisError:
                return  # it is still reading its file
            finally:
                await client.aclose()

    async def _reset_connections(self) -> None:
        """As a load balancer whose backend is away."""
        async with self._server_is_ours:
            with self._proxy.resetting():
                await asyncio.sleep(self._rng.uniform(*OUTAGE_S))

    async def _set_clock(self) -> None:
        """Forward or back, never far from the true time: what is kept for a minute is needed."""
        self._clock.set(self._rng.uniform(-CLOCK_S, CLOCK_S))

    async def _restart_server(self, end: Callable[[], None]) -> None:
        async with self._server_is_ours:
            end()
            await asyncio.sleep(self._rng.uniform(*OUTAGE_S))
            self._deployment.server.start()
