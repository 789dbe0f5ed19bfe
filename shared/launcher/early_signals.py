"""Stop signals that arrive before an event loop handles them.

They are recorded, not raised: Python prints and drops a KeyboardInterrupt that is raised inside a
callback of an import or a fork, and the launcher would go on. Imports nothing that takes long.
"""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EarlySignals:
    """Records signals from `catch` until an event loop handles them itself, or until `let_go`."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def catch(self) -> None:
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
