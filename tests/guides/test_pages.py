"""Guides name what there is, and nothing that they should name is missing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer.main
import yaml

from penstock.cli.application import application
from penstock.launcher.settings import setting_names
from shared.environment import PREFIX
from tests.support.operator_pages import OPERATE, lines_of
from tests.support.sentences import error_codes, start_sentences
from tests.support.table import table

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDES = sorted((REPOSITORY / "docs/guides").rglob("*.md"))
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
        pages = [guide.name for guide in GUIDES if guide.parent.name == "guides"]
        assert [
            name for name in [*pages, "operate/README.md"] if f"guides/{name}" not in text
        ] == []


def test_each_task_of_an_operator_is_linked_and_begins_with_its_commands() -> None:
    pages = {page.stem: page.read_text() for page in OPERATE.glob("*.md")}
    index = pages.pop("README")
    assert set(re.findall(r"\]\(([\w-]+)\.md\)", index)) == set(pages)
    for name, text in pages.items():
        before, _, _ = text.partition("```sh\n")
        assert len(before.splitlines()) <= 6, name
        assert lines_of(name), name


@table("page", sorted(OPERATE.glob("*.md")))
def test_commands_and_values_that_a_task_names_exist(page: Path) -> None:
    """Those that no test runs, too: of helm, and of the tasks that only the program walks."""
    for line in lines_of(page.stem):
        words = shlex.split(line)
        if "penstock" in words:
            named = words[words.index("penstock") + 1 :]
            assert has_command(typer.main.get_command(application()), named), line
        for name in re.findall(r"([\w.]+)=(?:OLD|NEW)", line):
            values = yaml.safe_load((REPOSITORY / "deploy/helm/penstock/values.yaml").read_text())
            for key in name.split("."):
                values = values[key]


def has_command(command: Any, words: list[str]) -> bool:
    """Whether a command has these subcommands and flags, but for those of settings."""
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    given = {word for word in words if word.startswith("--")}
    settings = {f"--{name.lower().replace('_', '-')}" for name in SETTINGS}
    is_whole = not words or not hasattr(command, "commands")
    return is_whole and command.name != "penstock" and given <= flags | settings


@table("line", ["workers drian X", "workerz", "jobs list --died", ""])
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    assert not has_command(typer.main.get_command(application()), line.split())
