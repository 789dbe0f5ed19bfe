"""Pages, deployments and the output of the programs name settings with their prefix."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.launcher.settings import setting_names
from shared.environment import PREFIX, name_warnings
from tests.support.table import table

REPOSITORY = Path(__file__).resolve().parents[2]
# Not a part of a path, of another name, of a page's, or of a program's option.
NAME = re.compile(r"(?<![\w/.-])[A-Z][A-Z0-9_]+(?!\w|\.md)")
# Where a name without the prefix is meant: words of the line.
MEANT = {
    "docs/PROMISES.md": ("another program's `HOST`",),
    "docs/CLI.md": ("| `MODEL` |",),
    # The name of a span.
    "docs/TRACES.md": ("`chat MODEL`",),
    # What Kubernetes makes of a Service.
    "shared/environment.py": ("SERVICE_(HOST|PORT)",),
}

SETTINGS = {name.upper() for name in setting_names()}
# Of an exercise in docs/EXTENDING.md, and of the tests.
NO_SETTINGS = {"PENSTOCK_REVERSE_SKIP", "PENSTOCK_EXAMPLES", "PENSTOCK_STORM_S"}


# Of commands, ours and others', and links to pages.
ARGUMENT = re.compile(r"\b(up|worker|serve|run) \[?MODEL\b|\[([A-Z]+)\](?=\([\w./]*\2\.md)")


def unprefixed(text: str) -> list[str]:
    """Returns the settings that a text names without the prefix."""
    return [name for name in NAME.findall(ARGUMENT.sub("", text)) if name in SETTINGS]


def is_meant(path: str, text: str) -> bool:
    return any(words in text for words in MEANT.get(path, ()))


def listed(*patterns: str) -> list[str]:
    found = subprocess.run(
        ["git", "ls-files", *patterns], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return found.stdout.split()


DEPLOYED = listed(
    "docker-compose.yml",
    ".env",
    "*Dockerfile*",
    ".dockerignore",
    "Makefile",
    ".ci",
    ".github",
    "deploy",
    "tools/demo_model/questions.txt",  # which the demo model repeats
)
PAGES = [path for path in listed("*.md") if not path.startswith(("docs/adr/", "tools/", "tests/"))]
SOURCES = listed("api/*.py", "worker/*.py", "shared/*.py", "penstock/*.py")


@pytest.mark.promise(
    "Command: files of deployments, pages and messages name a setting as it is set, with the prefix"
)
@table("path", DEPLOYED)
def test_deployments_set_no_name_without_the_prefix(path: str) -> None:
    """No process would read it."""
    assert unprefixed((REPOSITORY / path).read_text()) == []


@table("path", PAGES)
def test_pages_name_settings_as_they_are_set(path: str) -> None:
    for line in (REPOSITORY / path).read_text().splitlines():
        assert is_meant(path, line) or unprefixed(line) == [], line


@table("path", [*DEPLOYED, *(path for path in PAGES if path != "CHANGELOG.md")])
def test_names_with_the_prefix_are_those_of_settings(path: str) -> None:
    """What the programs would warn of is no name that anybody should copy."""
    text = (REPOSITORY / path).read_text()
    for name in set(re.findall(rf"\b{PREFIX}[A-Z0-9_]*[A-Z0-9]\b", text)) - NO_SETTINGS:
        assert name_warnings({name: "1"}, SETTINGS) == [], name


@table("path", SOURCES)
def test_sentences_of_the_programs_name_settings_as_they_are_set(path: str) -> None:
    for number, text in sentences((REPOSITORY / path).read_text()):
        assert is_meant(path, text) or unprefixed(text) == [], f"{path}:{number}: {text}"


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """Yields the strings of a module that are more than one word, without docstrings."""
    tree = ast.parse(source)
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if id(node) not in documents and re.search(r"[^\w]", text):
                yield node.lineno, text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("set REDIS_URL or HOST", ["REDIS_URL", "HOST"]),
        ("MODEL=x", ["MODEL"]),
        ("penstock up MODEL, vllm serve MODEL", []),
        (f"{PREFIX}MODEL, VLLM_MODEL, /HOST, GATEWAY", []),
    ],
)
def test_a_name_is_found_in_a_text(text: str, found: list[str]) -> None:
    assert unprefixed(text) == found
    assert [text for _, text in sentences(f'"""{text}"""\nf(f"{text} {{x}}")')] == [f"{text} "]
