"""docs/RELIABILITY.md lists the scenarios that there are."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = (FOLDER.parents[1] / "docs" / "RELIABILITY.md").read_text(encoding="utf-8")


def test_the_page_names_every_scenario_and_no_other() -> None:
    files = [path for path in FOLDER.glob("test_*.py") if path != Path(__file__)]
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    assert set(re.findall(r"`(test_\w+)`", PAGE)) == set(re.findall(r"def (test_\w+)", sources))
