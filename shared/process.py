"""Child processes that end with their parent, however that ends (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1
# Looked up on import: a child between fork and exec must not take the loader's locks.
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def die_with_parent(parent_pid: int, signum: signal.Signals) -> None:
    """Asks the kernel to send `signum` to this process when the thread that started it ends.

    Ends this process at once where the parent `parent_pid` has already ended. Elsewhere than on
    Linux nothing else is done.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent_pid:
        os._exit(0)


def dying_with_this_process(
    signum: signal.Signals = signal.SIGTERM,
) -> Callable[[], None] | None:
    """Returns a `preexec_fn` for `subprocess` that calls `die_with_parent` in the child.

    Start the child from a thread that lives as long as this process. None elsewhere than on Linux.
    """
    return None if _prctl is None else partial(die_with_parent, os.getpid(), signum)
