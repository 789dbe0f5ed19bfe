"""Child processes: started in sessions of their own, restarted when they die, ended with us."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from shared.launcher.exit_words import how_it_ended
from shared.launcher.restarts import GaveUp, Restarts
from shared.settings import EXIT_BAD_SETTINGS

PR_SET_PDEATHSIG = 1


def _ends_with_parent() -> Callable[[], None] | None:
    """For a child, between fork and exec: a launcher killed with -9 leaves no orphan behind.

    Linux only; elsewhere the children go on until somebody stops them.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork, where locks can be taken
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


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
                preexec_fn=_ends_with_parent(),
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
