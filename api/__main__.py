"""`python -m api`: one frontend."""

from __future__ import annotations

import sys

from shared.collector import resting

if __name__ == "__main__":
    with resting():
        from api.process import main

    sys.exit(main())
