"""Writes the reading paths into docs/ARCHITECTURE.md. `make docs` runs it; `--check` compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from generated_page import write_or_check

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.stats import path_table, read_modules  # noqa: E402

PAGE = Path(__file__).with_name("ARCHITECTURE.md")
PLACE = re.compile(r"(<!-- make docs: reading paths -->\n).*?(<!-- end -->)", re.DOTALL)


def render() -> str:
    table = path_table(read_modules(ROOT))
    page, found = PLACE.subn(lambda place: place[1] + table + place[2], PAGE.read_text())
    assert found == 1, "the page has one place for the table"
    return page


if __name__ == "__main__":
    raise SystemExit(write_or_check(PAGE, render()))
