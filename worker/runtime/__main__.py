"""The engine's own process: `python -m worker.runtime <fd> <parent pid>`."""

from __future__ import annotations

import sys

from worker.runtime.process import main

if __name__ == "__main__":
    sys.exit(main())
