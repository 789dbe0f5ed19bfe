"""SettableClock: a server's clock that a test sets while the server runs (libfaketime)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

LIBRARIES = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/local/lib/faketime")


def library() -> Path:
    """The preloaded library; AssertionError with a sentence where it is not installed."""
    for folder in LIBRARIES:
        for found in Path("/").glob(f"{folder[1:]}/libfaketime.so.1"):
            return found
    raise AssertionError("no libfaketime: apt-get install libfaketime")


class SettableClock:
    """The clock of every process that is started within `governs`: the true one plus an offset.

    Only the wall clock: what measures time that passes is left alone, as when a clock is set.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0)

    @contextmanager
    def governs(self) -> Iterator[None]:
        env = {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        with mock.patch.dict(os.environ, env):
            yield

    def set(self, offset_s: float) -> None:
        """So many seconds from the true time, at once."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{offset_s:+g}")
        new.replace(self._path)
