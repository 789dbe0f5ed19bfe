"""`python -m worker`: serve one model; docs/CONFIG.md lists the variables it reads."""

from __future__ import annotations

import sys

from worker.main import main

if __name__ == "__main__":
    sys.exit(main())
