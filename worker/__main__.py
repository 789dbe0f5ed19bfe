"""`python -m worker`: serve one model; docs/CONFIG.md lists the variables it reads."""

from __future__ import annotations

import sys

from shared.collector import resting

if __name__ == "__main__":
    with resting():
        from worker.main import main

    sys.exit(main())
