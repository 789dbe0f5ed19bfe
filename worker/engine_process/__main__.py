"""The engine's own process: `python -m worker.engine_process <fd> <parent pid>`."""

from __future__ import annotations

import sys

from worker.engine_process.process import main

if __name__ == "__main__":
    sys.exit(main())
