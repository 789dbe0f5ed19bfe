"""The processor of this machine: its name and the instructions that it has."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_model() -> str:
    """Returns the processor's name; where the system does not report it, its kind."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "CPU part"):
                return value.strip()
    return platform.processor() or platform.machine()


def cpu_features() -> frozenset[str]:
    """Returns the kernel's flags of the first CPU; empty where the system does not report them.

    The kernel's list and not cpuid's: it leaves out what the system does not save on a task switch.
    """
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86, ARM
                return frozenset(value.split())
    if sys.platform == "darwin" and is_arm():
        return frozenset({"asimd", *(name for name in ("bf16", "i8mm") if _apple_has(name))})
    return frozenset()


def is_arm() -> bool:
    """Returns whether this is a 64-bit ARM processor."""
    return platform.machine().lower() in ("aarch64", "arm64")


def _apple_has(feature: str) -> bool:
    command = ["/usr/sbin/sysctl", "-n", f"hw.optional.arm.FEAT_{feature.upper()}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "1"
