"""Generated pages are fresh, and what is an API is documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import typer.main

from penstock.cli.application import application
from shared.messages import ErrorCode
from tests.support.table import table

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])


@table(
    "page",
    [
        *("api", "chart_schema", "cli", "config", "metrics", "paths", "plots", "promises"),
        *("rescue", "scaling"),
    ],
)
def test_a_generated_page_is_what_the_code_says(page: str) -> None:
    """Parameters of the OpenAPI document, commands of the application, settings of the settings
    classes, metrics of their tables, reading paths of their files, plots of BENCHMARKS, promises
    of the marks on tests; the picture of a rescue is that of its record, which must be one."""
    ended = subprocess.run(
        [sys.executable, f"docs/generate_{page}.py", "--check"], cwd=REPOSITORY, timeout=60
    )
    assert ended.returncode == 0, "run `make docs`"


def test_the_picture_of_a_rescue_is_small_and_stands_still_where_that_is_preferred() -> None:
    """Without animation it is the end of the run: every rule that moves something says where it
    ends."""
    picture = (REPOSITORY / "docs/rescue.svg").read_text()
    assert len(picture.encode()) < 60_000
    assert "@media (prefers-reduced-motion:reduce){*{animation:none!important}}" in picture
    assert "@media (prefers-color-scheme:dark)" in picture
    moved = re.findall(r"\.(\w+)\{(opacity|transform):[^;]+;animation:(\w+) ", picture)
    assert len(moved) == picture.count("animation:") - 1  # without the rule above
    assert all(name == played for name, _, played in moved)


def test_every_error_code_is_listed_in_the_wire_page() -> None:
    page = (REPOSITORY / "docs/WIRE.md").read_text()
    assert [code for code in ErrorCode if f"`{code.value}`" not in page] == []


@table("page", PAGES)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    pictures = re.findall(r'\b(?:src|srcset)="([^"#:{]+)"', text)
    for target in [*links, *pictures]:
        assert (page.parent / target).exists(), target


@table("page", PAGES)
def test_pages_name_tests_that_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`(tests/[\w/.]+\.py)(?:::([\w:]+))?[^`]*`", text)
    assert len(named) == len(re.findall(r"`tests/[^`]*\.py[^`]*`", text)), "one cannot be read"
    for path, test in named:
        source = REPOSITORY / path
        assert source.exists(), path
        for name in test.split("::") if test else []:
            assert re.search(rf"(def|class) {name}\b", source.read_text()), f"{path}::{test}"


@table("page", ["ARCHITECTURE", "EXTENDING"])
def test_files_and_functions_that_the_walks_name_exist(page: str) -> None:
    """`room/file.py:Class.method`, as ARCHITECTURE.md writes its walks."""
    text = (REPOSITORY / f"docs/{page}.md").read_text()
    named = re.findall(r"`((?:api|worker|shared|tools)/[\w./]+\.\w+)(?::([\w.]+))?`", text)
    assert len(named) > 20
    for path, function in named:
        source = (REPOSITORY / path).read_text()
        for name in function.split(".") if function else []:
            assert re.search(rf"(def|class) {name}\b", source), f"{path}:{function}"


RECIPES = re.findall(
    r"<!-- files of: (\S+) -->\n(.*?)\n\n",
    (REPOSITORY / "docs/EXTENDING.md").read_text(),
    re.S,
)


def test_there_are_recipes_with_examples() -> None:
    assert len(RECIPES) > 2


@table(("example", "rows"), RECIPES)
def test_a_recipe_lists_the_files_of_the_product_that_name_its_example(
    example: str, rows: str
) -> None:
    listed = {path for row in rows.splitlines() for path in re.findall(r"`([^`]+)`", cell(row))}
    names = re.compile(rf"(?<![\w-]){re.escape(example)}(?![\w-])", re.I)
    found = {
        str(path.relative_to(REPOSITORY))
        for room in ("api", "worker", "shared", "penstock", "clients/typescript/src")
        for path in (REPOSITORY / room).rglob("*.*")
        if path.suffix in {".py", ".lua", ".js", ".ts", ".html"} and names.search(path.read_text())
    }
    assert listed == found


def cell(row: str) -> str:
    """Returns the first cell of a table's row."""
    return row.split("|")[1] if row.startswith("|") else ""


def test_commands_that_the_readme_names_exist() -> None:
    commands = typer.main.get_command(application()).commands  # type: ignore[attr-defined]
    named = re.findall(
        r"^(?:\.venv/bin/)?penstock ([a-z]+)", (REPOSITORY / "README.md").read_text(), re.M
    )
    assert len(named) > 6
    assert set(named) <= set(commands)


def test_make_targets_that_the_readme_names_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", (REPOSITORY / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.M), target
