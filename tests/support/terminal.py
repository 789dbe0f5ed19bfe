"""A command in a terminal of its own: what it showed, when, and for how long it showed nothing."""

from __future__ import annotations

import codecs
import fcntl
import itertools
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shared.process import dying_with_this_process
from tests.support.launched import descendants_of

ROWS, COLUMNS = 40, 140
POLL_S = 0.02
_CONTROLS = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])")


@dataclass(frozen=True)
class Line:
    """What ended with a new line or a carriage return, and when, in seconds since the start."""

    at_s: float
    text: str


@dataclass(frozen=True)
class Silence:
    """So many seconds without a byte, behind the line `after`."""

    seconds: float
    after: str


class Terminal:
    """`with Terminal(words, directory, env) as terminal:` the command runs as one that was typed.

    Ctrl-C is a key here: it reaches all processes in the foreground. Leaving the block ends it.
    """

    def __init__(
        self,
        words: Sequence[str],
        directory: Path,
        env: Mapping[str, str],
        user: str | None = None,
    ) -> None:
        self._began_s = time.monotonic()
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        as_user = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        self.process = subprocess.Popen(
            words,
            cwd=directory,
            env=dict(env),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_in_foreground_of(slave),
            **as_user,  # type: ignore[call-overload]
        )
        os.close(slave)
        self._bytes_at_s: list[tuple[float, str]] = [(0.0, "")]  # with the last line that was there
        self._lines: list[Line] = []
        self._rest = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Everything so far, without colours, a line for each that was shown."""
        return "".join(f"{line.text}\n" for line in [*self._lines]) + self._rest

    @property
    def lines(self) -> list[Line]:
        return [*self._lines]

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    def until(self, pattern: str, timeout_s: float) -> float:
        """Waits until a line has `pattern`; returns when it was shown. Fails with the output."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            has_ended = self.process.poll() is not None and not self._reader.is_alive()
            if (at_s := self.when(pattern)) is not None:
                return at_s
            assert not has_ended, f"ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline_s, f"no {pattern!r}:\n{self.output}"
            time.sleep(POLL_S)

    def when(self, pattern: str, nth: int = 0) -> float | None:
        """Returns when the nth line with `pattern` was shown; None where none was."""
        found = [line.at_s for line in [*self._lines] if re.search(pattern, line.text)]
        return found[nth] if len(found) > nth else None

    def silences(self, longer_than_s: float, until_s: float) -> list[Silence]:
        """Returns the waits without a byte up to `until_s`."""
        moments = [moment for moment in [*self._bytes_at_s] if moment[0] <= until_s]
        moments.append((until_s, ""))
        return [
            Silence(later[0] - earlier[0], earlier[1])
            for earlier, later in itertools.pairwise(moments)
            if later[0] - earlier[0] > longer_than_s
        ]

    def cpu_s(self) -> float:
        """Processor time of the command and all that it has started, what has ended too."""
        ticks = 0
        for pid in (self.process.pid, *descendants_of(self.process.pid)):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:  # it has ended, and counts among the children of another
                continue
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def wait(self, timeout_s: float) -> int:
        """Returns the exit code. Fails where it does not end."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._reader.join(10)
        os.close(self._master)

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while True:
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # the last process has closed it
                return
            self._take(decoder.decode(piece))

    def _take(self, text: str) -> None:
        at_s = self.now_s()
        *ended, self._rest = re.split(r"\r*\n|\r", self._rest + text)
        for raw in ended:
            if shown := _CONTROLS.sub("", raw).rstrip():
                self._lines.append(Line(at_s, shown))
        last = _CONTROLS.sub("", self._rest).strip() or (
            self._lines[-1].text if self._lines else ""
        )
        self._bytes_at_s.append((at_s, last))


def _in_foreground_of(slave: int) -> Callable[[], None]:
    """Returns what makes a new session's terminal of `slave`, in the child."""
    die_with_parent = dying_with_this_process()

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in the background
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        if die_with_parent is not None:
            die_with_parent()

    return prepare
