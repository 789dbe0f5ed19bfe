"""Processes: children that end with their parent (Linux), early stop signals, a child's reports."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

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


REPORT_FD = "PENSTOCK_REPORT_FD"  # set by a launcher for its children: a pipe to it
MAX_REPORT_BYTES = 4096  # a pipe takes this at once
READY = b"\0"  # in no sentence


def report_refusal(sentence: str) -> bool:
    """Tells the launcher that started this process why it cannot serve; False without a launcher.

    The launcher prints the sentence, with the name of the worker.
    """
    return _report(sentence.replace("\0", "").encode()[: MAX_REPORT_BYTES - len(READY)])


def report_ready() -> bool:
    """Tells the launcher that this process serves: its death is no failed start. False without a
    launcher."""
    return _report(READY)


def _report(content: bytes) -> bool:
    fd = os.environ.get(REPORT_FD, "")
    if not fd.isdecimal():
        return False
    try:
        os.write(int(fd), content)
    except OSError:  # not of this process: the variable was handed on
        return False
    return True


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EarlySignals:
    """Records stop signals from `catch` until an event loop handles them, or until `let_go`.

    They are not raised: Python prints and drops a KeyboardInterrupt that is raised inside a
    callback of an import or a fork, and the launcher would continue.
    """

    def __init__(self) -> None:
        self.received: list[int] = []

    def catch(self) -> None:
        """Handles the signals from now on; the second one raises KeyboardInterrupt."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._remember)

    def let_go(self) -> None:
        """Restores Python's own handlers."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
        if len(self.received) > 1:  # a second one does not wait for a server that loads
            raise KeyboardInterrupt
