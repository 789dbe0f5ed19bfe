"""EarlySignals: requests to stop that come before an event loop can take them.

Remembered, not raised: a KeyboardInterrupt that strikes inside a callback of an import or a fork is
printed and forgotten there, and the launcher would go on as if nobody had asked it to stop.
"""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EarlySignals:
    """From `catch` until an event loop handles signals itself, or `let_go`."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def catch(self) -> None:
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._remember)

    def let_go(self) -> None:
        """Python's own handling again."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
        if len(self.received) > 1:  # whoever asks twice does not wait, for a server that loads say
            raise KeyboardInterrupt
