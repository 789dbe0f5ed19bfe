"""Supervised processes: workers and frontends, and the Redis that they depend on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Protocol

from redis.exceptions import AuthenticationError

from penstock.launcher.redis_server import ServerError
from shared.backoff import Backoff
from shared.logs import PROCESS_NAME, host_name
from shared.outages import Outage
from shared.partitions import PartitionCount
from shared.process import MAX_REPORT_BYTES, READY, REPORT_FD, dying_with_this_process
from shared.settings import EXIT_BAD_SETTINGS
from shared.transport.connect import RedisTransport
from shared.transport.partitions.transport import open_partitions
from shared.transport.ports.jobs import TransportError


class Child:
    """One supervised process.

    It gets a session of its own, so that the terminal's Ctrl-C reaches the launcher alone and
    the launcher decides who stops when.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        say: Callable[[str], None],
        on_death: Callable[[int], Awaitable[None]] | None = None,
        *,
        reports_ready: bool = False,
    ) -> None:
        """`say` prints a line; `on_death(pid)` is called for each process that died by itself.

        With `reports_ready` a start counts as failed, however long it took, until one has called
        `report_ready`.
        """
        self.name = name
        self._argv = list(argv)
        self._env = {**env, PROCESS_NAME: name}
        self._say = say
        self._on_death = on_death
        self._must_report = reports_ready
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.was_dismissed = False  # ended by an order

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def supervise(self) -> None:
        """Runs the process until `stop`; restarts it when it dies. Raises GaveUp."""
        restarts = RestartPolicy(self.name)
        has_served = not self._must_report
        while not self._stopping.is_set():
            started = time.monotonic()
            with ReportPipe() as pipe:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    env=self._env | pipe.environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=pipe.pass_fds,
                    start_new_session=True,
                    preexec_fn=dying_with_this_process(),
                )
                code = await self._process.wait()
                was_ready, refusal = pipe.read()
            if self._stopping.is_set():
                return
            if code == EXIT_BAD_SETTINGS:  # a restart would not help
                raise GaveUp(self.name, refusal or "refused to start", EXIT_BAD_SETTINGS)
            if code == 0 and refusal:  # an order, no death
                self._say(f"{self.name} ended: {refusal}; it is not started again")
                self.was_dismissed = True
                return
            if self._on_death is not None:
                await self._on_death(self._process.pid)
            has_served = has_served or was_ready
            lived_s = time.monotonic() - started if has_served else 0.0
            how = how_it_ended(code)
            try:
                backoff_s = restarts.backoff_s(lived_s)
            except GaveUp as error:
                unready = "" if has_served else " and was never ready"
                reason = f"{error.reason}{unready}: {refusal or how}"
                raise GaveUp(error.name, reason, error.exit_code) from None
            self._say(f"{self.name} ended ({how}); starting it again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Signals the process to end; `supervise` returns once it did. Repeat with SIGKILL."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if signum is signal.SIGKILL:
                    # Its session holds its own children (the engine process) too.
                    os.killpg(self._process.pid, signum)
                else:
                    self._process.send_signal(signum)


class ReportPipe:
    """The launcher's end of a pipe on which one child reports that it serves, or why it cannot."""

    def __init__(self) -> None:
        self._own, self._childs = os.pipe()
        os.set_blocking(self._own, False)
        self.pass_fds = (self._childs,)
        self.environment = {REPORT_FD: str(self._childs)}

    def read(self) -> tuple[bool, str]:
        """Returns whether a child that has ended had been ready, and its sentence or ""."""
        content = b""
        with contextlib.suppress(BlockingIOError):
            content = os.read(self._own, MAX_REPORT_BYTES)
        return READY in content, content.replace(READY, b"").decode(errors="replace")

    def __enter__(self) -> ReportPipe:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._own)
        os.close(self._childs)


MAX_QUICK_DEATHS = 5  # deaths in a row, each before HEALTHY_AFTER_S
HEALTHY_AFTER_S = 10.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0


class GaveUp(Exception):
    """The process `name` cannot be kept running; `exit_code` is the launcher's."""

    def __init__(self, name: str, reason: str, exit_code: int) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason
        self.exit_code = exit_code


class RestartPolicy:
    """Limits the restarts of one process; one that lived for HEALTHY_AFTER_S counts from zero."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)

    def backoff_s(self, lived_s: float) -> float:
        """Returns the pause before the next start. Raises GaveUp after too many quick deaths."""
        if lived_s >= HEALTHY_AFTER_S:
            self._backoff.reset()
        pause_s = self._backoff.next_s()
        if self._backoff.num_failures > MAX_QUICK_DEATHS:
            raise GaveUp(self._name, f"died {self._backoff.num_failures} times in a row", 1)
        return pause_s


def how_it_ended(code: int) -> str:
    """Returns e.g. `SIGKILL` or `exit code 3`, from a return code of `subprocess`."""
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


REPORT_TIMEOUT_S = 2.0  # the lease ends anyway


async def report_worker_death(
    redis_url: str, namespace: str, count: PartitionCount, pid: int
) -> None:
    """Ends the lease of this machine's worker with this process id: its jobs are recovered at once.

    Without it they wait for the end of the lease. Never raises; takes REPORT_TIMEOUT_S at most.
    """
    transport = await open_partitions(redis_url, count, namespace=namespace)
    try:
        async with asyncio.timeout(REPORT_TIMEOUT_S):
            for worker in await transport.registry.workers():
                is_here = worker.worker_id.rpartition("-")[0] == host_name()
                if is_here and worker.stats.get("pid") == pid:
                    await transport.queue.declare_dead(worker.worker_id)
    except (TransportError, TimeoutError):
        pass
    finally:
        await transport.aclose()


POLL_S = 0.1


class Server(Protocol):
    """The part of PrivateServer that its supervision needs."""

    version: str

    @property
    def exit_code(self) -> int | None: ...
    def respawn(self) -> None: ...
    def answers(self) -> bool: ...
    def last_log_line(self) -> str: ...


class RedisSupervisor:
    """Restarts a private server that dies; its file has kept the jobs.

    The server has been started already. Workers and frontends wait while it is away.
    """

    def __init__(self, server: Server, say: Callable[[str], None]) -> None:
        self._server = server
        self._say = say

    async def supervise(self) -> None:
        """Runs until cancelled. Raises GaveUp. Run it in the thread that started the server: the
        server ends with that thread."""
        server = self._server
        restarts = RestartPolicy(f"the private {server.version}")
        began_s = time.monotonic()
        while True:
            while server.exit_code is None:
                await asyncio.sleep(POLL_S)
            try:
                backoff_s = restarts.backoff_s(time.monotonic() - began_s)
            except GaveUp as error:
                reason = f"{error.reason}: {server.last_log_line()}"
                raise GaveUp(error.name, reason, error.exit_code) from None
            how = how_it_ended(server.exit_code)
            self._say(f"the private {server.version} ended ({how}); starting it again")
            await asyncio.sleep(backoff_s)
            began_s = time.monotonic()
            try:
                server.respawn()
            except ServerError as error:
                raise GaveUp(f"the private {server.version}", str(error), 1) from error
            while server.exit_code is None:
                if await asyncio.to_thread(server.answers):
                    self._say(f"the private {server.version} is back, with the jobs of its file")
                    break
                await asyncio.sleep(POLL_S)


LOOK_S = 1.0

_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (AuthenticationError, "it refuses the user or password"),
    (ConnectionRefusedError, "the connection is refused"),
    (FileNotFoundError, "there is no such socket"),
    (PermissionError, "the socket must not be opened"),
    (socket.gaierror, "the host's name is not known"),
    (ssl.SSLCertVerificationError, "its certificate is not trusted"),
    (ssl.SSLError, "TLS failed"),
    (TimeoutError, "it does not answer"),
)


class RedisWatch:
    """Pings a given Redis once a second, and prints when it goes away and comes back.

    `trouble` is a sentence while it is away, None otherwise. Nothing else depends on it: workers
    and frontends start without the server, and continue when it comes.
    """

    def __init__(self, transport: RedisTransport, say: Callable[[str], None]) -> None:
        self._transport = transport
        self._say = say
        self.trouble: str | None = None

    async def run(self) -> None:
        """Runs until cancelled."""
        outage = Outage()
        while True:
            try:
                await self._transport.store.ping()
            except TransportError as error:
                self.trouble = (
                    f"Redis at {self._transport.url} cannot be reached: {reason_of(error)}"
                )
                if outage.failed() is not None:
                    self._say(
                        f"{self.trouble}. Waiting for it; its address is set by PENSTOCK_REDIS_URL."
                    )
            else:
                self.trouble = None
                outage_s = outage.succeeded()
                if outage_s is not None:
                    self._say(f"Redis answers, after {outage_s:.0f} s")
            await asyncio.sleep(LOOK_S)


def reason_of(error: BaseException) -> str:
    """Returns a short cause of an error; the library's own text would repeat addresses."""
    causes = list(_chain(error))
    for kind, words in _REASONS:
        if any(isinstance(cause, kind) for cause in causes):
            return words
    return type(causes[-1]).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
