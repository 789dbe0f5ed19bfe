"""What the scripts that write a page of docs/ do with it."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(path: Path, page: str) -> int:
    """Writes the page, or with `--check` only compares it. Returns the exit status: 1 where the
    file differs."""
    if "--check" in sys.argv:
        return 0 if path.exists() and path.read_text() == page else 1
    path.write_text(page)
    return 0
