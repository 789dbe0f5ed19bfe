"""Guides name what there is, and nothing that they should name is missing."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.launcher.settings import setting_names
from shared.environment import PREFIX
from tests.support.sentences import error_codes, start_sentences
from tests.support.table import table

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDES = sorted((REPOSITORY / "docs/guides").glob("*.md"))
TROUBLES = REPOSITORY / "docs/guides/troubleshooting.md"
# Of a row's first cell: what looks like a code.
CODE = re.compile(r"`([a-z]+(?:_[a-z]+)*)`")
SENTENCE_CHARS = 24
OF_THE_COMMAND = {"URL", "KEY"}
SETTINGS = {name.upper() for name in setting_names()}


def codes_of_the_page() -> set[str]:
    """The codes in the first cells of the tables with errors."""
    _, _, errors = TROUBLES.read_text().partition("## Errors of requests")
    errors, _, _ = errors.partition("## Errors at start")
    rows = [line.split(" | ")[0] for line in errors.splitlines() if line.startswith("| `")]
    return {code for row in rows for code in CODE.findall(row)}


def test_every_error_code_has_a_remedy() -> None:
    known = error_codes()
    assert len(known) > 70
    assert sorted(known - codes_of_the_page()) == []


def test_no_error_code_is_made_up() -> None:
    assert sorted(codes_of_the_page() - error_codes()) == []


def test_every_sentence_of_a_start_that_fails_has_a_remedy() -> None:
    page, sentences = TROUBLES.read_text(), start_sentences()
    assert len(sentences) > 30
    missing = {part: place for part, place in sentences.items() if not is_in(part, page)}
    assert missing == {}


def is_in(part: str, page: str) -> bool:
    return part[:SENTENCE_CHARS].rstrip(" (,;:") in page


@table("guide", GUIDES)
def test_every_setting_of_a_guide_exists(guide: Path) -> None:
    named = re.findall(rf"\b{PREFIX}([A-Z][A-Z_]*[A-Z])\b", guide.read_text())
    assert named
    assert sorted(set(named) - SETTINGS - OF_THE_COMMAND) == []


@table("guide", GUIDES)
def test_a_guide_writes_settings_with_their_prefix(guide: Path) -> None:
    bare = re.findall(r"`([A-Z][A-Z_]+)(?:=[^`]*)?`", guide.read_text())
    assert sorted(SETTINGS & set(bare)) == []


def test_guides_are_linked_from_readme_and_architecture() -> None:
    for page in ("README.md", "docs/ARCHITECTURE.md"):
        text = (REPOSITORY / page).read_text()
        assert [guide.name for guide in GUIDES if f"guides/{guide.name}" not in text] == []
