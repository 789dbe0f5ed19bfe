"""Scratch: a folder for the temporary files of one engine process, which goes with it.

vLLM, its compilers and its sockets leave files when they are killed. The worker removes the
folder; if the worker was killed too, the next one that starts does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TextIO

PREFIX = "penstock-engine-"
LOCK = ".penstock-lock"
OLD_S = 3600.0  # of a folder without a lock file: of one that is being made, or of an older version


class Scratch:
    """One folder. Its lock is held until `close`, and by every process that was given `fd`.

    A lock and no process id: workers in several containers may share a directory for them.
    """

    def __init__(self) -> None:
        """Makes the folder. Raises OSError."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = _locked(self.path / LOCK, "a")
            if lock is not None:
                self._lock = lock
                return
            # Another worker looked at it before it was locked, and has removed it or will.

    @property
    def fd(self) -> int:
        """The lock's descriptor, for `pass_fds`."""
        return self._lock.fileno()

    def close(self) -> None:
        """Removes the folder as far as possible. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep() -> list[Path]:
    """Removes the folders of this user whose processes have all ended; returns them."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, or not ours to remove
            if not path.is_symlink() and path.stat().st_uid == os.getuid() and _remove(path):
                removed.append(path)
    return removed


def _remove(path: Path) -> bool:
    """Removes a folder unless a process holds its lock; returns whether it did. Raises OSError."""
    if not (path / LOCK).exists():
        if time.time() - path.stat().st_mtime < OLD_S:
            return False
        shutil.rmtree(path)
        return True
    lock = _locked(path / LOCK, "r")
    if lock is None:
        return False
    with lock:
        shutil.rmtree(path)
    return True


def _locked(path: Path, mode: str) -> TextIO | None:
    """Returns the lock file, held until all its owners close it; None if another process holds it
    or has removed it."""
    try:
        lock: TextIO = open(path, mode, encoding="ascii")  # type: ignore[assignment]  # noqa: SIM115
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    lock.close()
    return None
