"""`python -m penstock.launcher`."""

from __future__ import annotations

import sys

from shared.collector import resting
from shared.process import EarlySignals

if __name__ == "__main__":
    early_signals = EarlySignals()
    early_signals.catch()
    # Only now: its own imports take a while, and a Ctrl-C meanwhile must not be lost.
    with resting():
        from penstock.launcher.main import main

    sys.exit(main(early_signals))
