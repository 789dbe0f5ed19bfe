"""Child processes: started in sessions of their own, restarted when they die, ended with us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from shared.backoff import Backoff
from shared.logs import host_name
from shared.process import dying_with_this_process
from shared.settings import EXIT_BAD_SETTINGS
from shared.transport.connect import open_transport
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
    ) -> None:
        """`on_death(pid)` is told of each process that ended without being asked to."""
        self.name = name
        self._argv = list(argv)
        self._env = dict(env)
        self._say = say
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def supervise(self) -> None:
        """Runs the process until `stop`; restarts it when it dies. Raises GaveUp."""
        restarts = Restarts(self.name)
        while not self._stopping:
            started = time.monotonic()
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=dying_with_this_process(),
            )
            code = await self._process.wait()
            if self._stopping:
                return
            if code == EXIT_BAD_SETTINGS:  # no restart mends that
                raise GaveUp(f"{self.name} refused to start", EXIT_BAD_SETTINGS)
            if self._on_death is not None:
                await self._on_death(self._process.pid)
            backoff_s = restarts.backoff_s(time.monotonic() - started)
            self._say(f"{self.name} ended ({how_it_ended(code)}); starting it again")
            await asyncio.sleep(backoff_s)

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Asks the process to end; `supervise` returns once it did. Repeat with SIGKILL."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if signum is signal.SIGKILL:
                    # Its session holds whatever it started (the engine process).
                    os.killpg(self._process.pid, signum)
                else:
                    self._process.send_signal(signum)


# Restarts: how often something that dies may be started again, and after which pause.

MAX_QUICK_DEATHS = 5  # deaths in a row, each before HEALTHY_AFTER_S
HEALTHY_AFTER_S = 10.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0


class GaveUp(Exception):
    """Something cannot be kept running; `exit_code` is what the launcher should end with."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class Restarts:
    """Counts the deaths of one thing. What lived long enough begins at zero again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)

    def backoff_s(self, lived_s: float) -> float:
        """The pause before the next start. Raises GaveUp after too many quick deaths in a row."""
        if lived_s >= HEALTHY_AFTER_S:
            self._backoff.reset()
        pause_s = self._backoff.next_s()
        if self._backoff.num_failures > MAX_QUICK_DEATHS:
            raise GaveUp(f"{self._name} died {self._backoff.num_failures} times in a row", 1)
        return pause_s


# How a process ended, in a word or two.


def how_it_ended(code: int) -> str:
    """E.g. `SIGKILL` or `exit code 3`, from a return code as `subprocess` gives it."""
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


# Obituary: whoever saw a worker die says so, and its jobs move at once.
#
# Without it they wait for the end of its lease, which is all that others can go by. The launcher is
# the parent of its workers: it knows.

PATIENCE_S = 2.0  # the lease ends anyway


class Obituary:
    """Of the workers of one Redis and namespace."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self._redis_url = redis_url
        self._namespace = namespace

    async def worker_died(self, pid: int) -> None:
        """Ends the lease of this machine's worker that had this process id. A store that is away is
        not told: never raises, and takes PATIENCE_S at most."""
        transport = await open_transport(self._redis_url, namespace=self._namespace)
        try:
            async with asyncio.timeout(PATIENCE_S):
                for worker in await transport.registry.workers():
                    is_here = worker.worker_id.rpartition("-")[0] == host_name()
                    if is_here and worker.stats.get("pid") == pid:
                        await transport.queue.declare_dead(worker.worker_id)
        except (TransportError, TimeoutError):
            pass
        finally:
            await transport.aclose()
