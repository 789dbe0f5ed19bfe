"""Two machines: network namespaces of this one, with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

NO_MACHINES = "this machine lets nobody make network namespaces: they need root and ip"
ADDRESSES = ("10.0.0.1", "10.0.0.2")  # the first as the page has it


def can_make_machines() -> bool:
    """Whether this process may make namespaces: root may not in every container."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"pst-t{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    _ip("netns", "delete", name)
    return True


@contextmanager
def two_machines() -> Iterator[tuple[list[str], list[str]]]:
    """Yields what precedes a command that runs on the first, and on the second of them."""
    names = (f"pst-a{os.getpid()}", f"pst-b{os.getpid()}")
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip(
            *["link", "add", "eth0", "netns"],
            names[0],
            *["type", "veth", "peer", "name", "eth0", "netns"],
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        first, second = (["ip", "netns", "exec", name] for name in names)
        yield first, second


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)
