"""A rank above 0: `python -m worker.model.rank <fd> <parent pid>`."""

from __future__ import annotations

import os
import signal
import sys

from shared.collector import resting
from shared.process import die_with_parent

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to end
    die_with_parent(int(sys.argv[2]), signal.SIGKILL)
    # After that, and not above: torch takes seconds, in which rank 0 may be killed.
    with resting():
        from worker.model.rank.follower import main

    os._exit(main(int(sys.argv[1])))  # libraries that are taken down in order take a second
