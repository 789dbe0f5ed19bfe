"""docs/RELIABILITY.md lists the scenarios that there are."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = (FOLDER.parents[1] / "docs" / "RELIABILITY.md").read_text(encoding="utf-8")


def names_below(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("test_*.py") if path != Path(__file__)]
    return set(re.findall(r"def (test_\w+)", "".join(map(Path.read_text, files))))


def test_the_page_names_every_scenario_and_no_test_that_is_not_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert names_below(FOLDER) - named == set()
    assert named - names_below(FOLDER.parent) == set()
