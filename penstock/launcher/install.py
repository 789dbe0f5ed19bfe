"""pip, whose output is a file: the terminal gets one line that shows its progress.

    python -m penstock.launcher.install PyTorch torch==2.13.0

The first word is what the line calls it; the others are pip's. Standard library only: it runs
before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# Modules are compiled when they are first imported, which most of them never are: that is a quarter
# of the time of an installation.
PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile")
LOG = Path(".penstock/install.log")
TELL_S = 1.0  # between two updates of the line
LINE_S = 30.0  # between two lines, where the output is no terminal
LAST_LINES = 20  # of pip's output, where it failed
DOWNLOAD = re.compile(r"Downloading (?:\S*/)?([^\s/-]+)-\S* \((.+)\)")
CLEAR = "\r\x1b[K"
STOPPED = 128 + signal.SIGINT


def say(sentence: str) -> None:
    """Prints one line at the terminal."""
    sys.stderr.write(f"penstock: {sentence}\n")
    sys.stderr.flush()


def drop_half_installed(packages: Path) -> None:
    """Removes the metadata of packages whose install was interrupted: pip writes RECORD last, and
    takes a package without it for installed."""
    for metadata in packages.glob("*.dist-info"):
        if not (metadata / "RECORD").exists():
            shutil.rmtree(metadata)


class Progress:
    """One line about one installation, which a terminal shows in place; elsewhere a line every
    LINE_S seconds."""

    def __init__(self, what: str, packages: Path, expected_bytes: int | None) -> None:
        self._what = what
        self._packages = packages
        self._before = size_of(packages)
        self._of = f" of about {expected_bytes / 1e9:.1f}" if expected_bytes else ""
        self._began_s = self._told_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def tell(self, last_line: str) -> None:
        """Shows how far pip is. `last_line` of its output separates fetching from unpacking."""
        now_s = time.monotonic()
        if not self._is_terminal and now_s - self._told_s < LINE_S:
            return
        self._told_s = now_s
        state = "fetching packages"
        if last_line.startswith("Installing collected packages"):
            state = f"{self._size()}{self._of} GB unpacked"
        elif found := DOWNLOAD.search(last_line):
            state = f"fetching {found[1]} ({found[2]})"
        sentence = f"installing {self._what}: {state}, {now_s - self._began_s:.0f} s"
        if self._is_terminal:
            sys.stderr.write(f"{CLEAR}penstock: {sentence}")
            sys.stderr.flush()
        else:
            say(sentence)

    def end(self, is_done: bool) -> None:
        """Replaces the line by the outcome."""
        if self._is_terminal:
            sys.stderr.write(CLEAR)
        if is_done:
            took_s = time.monotonic() - self._began_s
            say(f"installed {self._what}, {self._size()} GB in {took_s:.0f} s")

    def _size(self) -> str:
        return f"{max(0, size_of(self._packages) - self._before) / 1e9:.1f}"


def install(words: Sequence[str], what: str, expected_bytes: int | None = None) -> int:
    """Runs `pip install` with the arguments `words` for this interpreter; returns the exit status.

    pip's output is appended to LOG; where pip fails, its last lines are shown. `expected_bytes`:
    what will be unpacked, if that is known.
    """
    packages = Path(sysconfig.get_path("purelib"))
    if sys.prefix != sys.base_prefix:  # Debian's own packages have no RECORD
        drop_half_installed(packages)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("a", encoding="utf-8") as log:
        begin = log.tell()
        progress = Progress(what, packages, expected_bytes)
        status = _run([*PIP, *words], log.fileno(), lambda: progress.tell(_lines(begin)[-1]))
    progress.end(is_done=status == 0)
    if status == STOPPED:
        say("stopped; the next start resumes the installation")
    elif status != 0:
        for line in _lines(begin)[-LAST_LINES:]:
            sys.stderr.write(f"  {line}\n")
        say(f"installing {what} failed: pip ended with status {status}. All it printed: {LOG}")
    return status


def _run(command: Sequence[str], output: int, tell: Callable[[], None]) -> int:
    """Returns the exit status of a command; STOPPED after Ctrl-C. Calls `tell` every TELL_S."""
    with subprocess.Popen(command, stdout=output, stderr=output) as pip:
        while True:
            try:
                return pip.wait(TELL_S)
            except subprocess.TimeoutExpired:
                tell()
            except KeyboardInterrupt:  # pip has it too, and ends tidily
                pip.wait()
                return STOPPED


def _lines(begin: int) -> list[str]:
    """Returns the lines of LOG from a position on; at least one."""
    with LOG.open("rb") as log:
        log.seek(begin)
        return log.read().decode(errors="replace").splitlines() or [""]


def size_of(directory: Path) -> int:
    """Returns the bytes of all files below; 0 without any."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip renames what it has written
                continue
    return total


if __name__ == "__main__":
    sys.exit(install(sys.argv[2:], sys.argv[1]))
