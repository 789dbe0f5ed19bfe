"""A whole Penstock started as `make run` starts it, for tests that go through the front door."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from shared.environment import variable_of
from shared.process import dying_with_this_process
from tests.support import document_check
from tests.support.forked import ForkedPopen
from tests.support.variables import with_prefix

REPOSITORY = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
PORTS = (12_000, 32_000)  # below every system's ephemeral range


def free_port(count: int = 1) -> int:
    """A loopback port that is free now, with `count - 1` free ones after it.

    None of those that the system gives to outgoing connections: one of the many that tests make
    would take it before the process under test has come to bind it.
    """
    for _ in range(200):
        port = random.randrange(*PORTS)
        try:
            for offset in range(count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        return port
    raise RuntimeError("no free port")


class Launched:
    """`with Launched(tmp_path) as penstock:` ready on entry, stopped by SIGINT on exit.

    `env` has settings by their names without the prefix, and other variables. `is_forked` False: by
    an exec, as users start it, for what measures times (tests.support.forked).
    """

    def __init__(
        self,
        directory: Path,
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        *,
        is_forked: bool = True,
        at_terminal: bool = False,
    ) -> None:
        """`at_terminal`: its output is a terminal's, not a pipe's."""
        self._directory = directory
        self._popen = ForkedPopen if is_forked else subprocess.Popen
        self._ready_timeout_s = ready_timeout_s
        self._at_terminal = at_terminal
        given = with_prefix(env or {})
        inherited = dict(os.environ)
        inherited.pop(variable_of("redis_url"), None)
        self._env = {
            **inherited,
            "PYTHONPATH": str(REPOSITORY),
            **document_check.environment(),
            "OMP_NUM_THREADS": "1",
            variable_of("log_level"): "INFO",
            variable_of("port"): str(free_port(int(given.get(variable_of("frontends"), "1")))),
            **given,
        }
        self.port = int(self._env[variable_of("port")])
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    @property
    def output(self) -> str:
        return "".join(self._lines)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> None:
        """Starts it; does not wait for the ready line."""
        screen, output = pty.openpty() if self._at_terminal else (None, subprocess.PIPE)
        self._process = self._popen(
            [sys.executable, "-m", "penstock.launcher"],
            cwd=self._directory,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=dying_with_this_process(),
        )
        lines = self._process.stdout
        if screen is not None:
            os.close(output)
            lines = os.fdopen(screen, encoding="utf-8")
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def start(self) -> Launched:
        self.spawn()
        assert self._process is not None
        deadline = time.monotonic() + self._ready_timeout_s
        while "Stop: Ctrl-C" not in self.output:
            if self._process.poll() is not None:
                self._reader.join(5)
                raise AssertionError(f"ended with {self._process.returncode}:\n{self.output}")
            if time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"not ready in {self._ready_timeout_s} s:\n{self.output}")
            time.sleep(0.02)
        return self

    def _read(self, lines: IO[str]) -> None:
        with lines, contextlib.suppress(OSError):  # a terminal whose last process has ended: EIO
            for line in lines:
                self._lines.append(line)

    def stop(self, signum: signal.Signals = signal.SIGINT) -> int:
        """Returns the exit code; kills after STOP_TIMEOUT_S, which is then a failure."""
        assert self._process is not None
        self._process.send_signal(signum)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"did not stop in {STOP_TIMEOUT_S} s:\n{self.output}") from None
        finally:
            self._reader.join(5)

    def kill(self) -> None:
        """Ends it by SIGKILL where it still runs."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._reader.join(5)

    def wait(self, timeout_s: float) -> int:
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self._reader.join(5)
        return code

    def descendants(self) -> list[int]:
        """Process ids of everything that it started and that still runs."""
        return descendants_of(self.pid)

    def curl_line(self) -> str:
        """The ready-to-paste line that was printed, as one line."""
        match = re.search(r"(curl -N .*\\\n.*)\n", self.output)
        assert match is not None, self.output
        return match.group(1).replace("\\\n", " ")

    def __enter__(self) -> Launched:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()


def descendants_of(pid: int) -> list[int]:
    """All live descendants of a process, from /proc (children of dead parents excluded)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: list[int] = []
    frontier = [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def is_alive(pid: int) -> bool:
    """False for zombies: what has ended is not alive because nobody waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
