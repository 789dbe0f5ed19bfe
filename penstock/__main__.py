"""`python -m penstock`: the command `penstock`."""

from __future__ import annotations

import sys

from penstock.cli.application import main

if __name__ == "__main__":
    sys.exit(main())
