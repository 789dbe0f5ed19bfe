"""permit_amx: the kernel's permission to use AMX, which vLLM's build for CPUs does not request.

Without it the first product of FP8 weights in blocks ends the process with SIGILL.
"""

from __future__ import annotations

import ctypes
import platform
import sys

# Linux on x86-64: docs.kernel.org/arch/x86/xstate.html
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def permit_amx() -> bool:
    """Requests AMX tiles for all threads of this process; returns whether it has them.

    Processes that this one starts have to ask for themselves.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
