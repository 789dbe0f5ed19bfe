"""What the CPU can do, in the words of /proc/cpuinfo."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_features() -> frozenset[str]:
    """The kernel's flags of the first CPU; empty where there is no /proc/cpuinfo, or not on x86.

    The kernel's list and not cpuid's: it leaves out what the system does not save on a task switch.
    """
    if platform.machine().lower() not in ("x86_64", "amd64") or not _CPUINFO.exists():
        return frozenset()
    for line in _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
