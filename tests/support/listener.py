"""The frontend behind a URL, for tests that kill it."""

from __future__ import annotations

import os
from pathlib import Path


def listener_on(url: str) -> int:
    """Returns the process that listens on the port of a URL."""
    port = int(url.rpartition(":")[2])
    hexed = f"{port:04X}"
    (inode,) = (
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{hexed}") and line.split()[3] == "0A"
    )
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            for handle in _handles(entry):
                if handle == f"socket:[{inode}]" and _is_frontend(entry):
                    return int(entry.name)
    raise AssertionError(f"nobody listens at {url}")


def _handles(process: Path) -> list[str]:
    try:
        return [os.readlink(handle) for handle in (process / "fd").iterdir()]
    except OSError:
        return []


def _is_frontend(process: Path) -> bool:
    return b"api" in (process / "cmdline").read_bytes().split(b"\0")
