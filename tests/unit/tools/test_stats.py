"""The figures of `make stats`, of a small checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import stats
from tools.stats import (
    Module,
    ReadingPath,
    closure,
    closure_rows,
    imported_modules,
    path_rows,
    path_table,
    read_modules,
    room_rows,
    shape_rows,
    too_long,
)

REPOSITORY = Path(__file__).resolve().parents[3]

FILES = {
    "api/__init__.py": '"""The web side."""\n',
    "api/main.py": "from api.chat import routes\n\ndef create_app():\n    return routes\n",
    "api/chat/routes.py": """from typing import TYPE_CHECKING

import shared.messages
from api.chat.request import Chat

if TYPE_CHECKING:
    from worker.main import main

@router.post("/v1/chat")
async def create(chat: Chat):
    from shared.keys import key
    return key
""",
    "api/chat/request.py": "from api.chat import routes\n\nclass Chat:\n    pass\n",
    "shared/messages.py": "import json\n",
    "shared/keys.py": "\n" * 9 + "key = 1\n",
    "shared/lua/pull.lua": "return 1\nreturn 2\n",
    "worker/main.py": "def main():\n" + "    pass\n" * 71,
    "tests/unit/test_chat.py": "def test_a(): pass\nclass TestB:\n    def test_b(self): pass\n",
    "tests/support/stage.py": "def test_server(): pass\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_imports_lead_to_modules_whatever_their_form(root: Path) -> None:
    modules = read_modules(root)
    assert imported_modules("api.main", modules) == {"api.chat.routes"}
    assert imported_modules("api.chat.routes", modules) == {
        *("shared.messages", "api.chat.request", "worker.main", "shared.keys")
    }
    assert imported_modules("shared.messages", modules) == set()


def test_a_closure_ends_where_modules_import_one_another(root: Path) -> None:
    modules = read_modules(root)
    assert closure("api.chat.request", modules) == {
        *("api.chat.request", "api.chat.routes", "shared.messages", "shared.keys", "worker.main")
    }


def test_the_closure_of_a_route_stays_in_the_rooms_of_a_frontend(root: Path) -> None:
    assert list(closure_rows(read_modules(root))) == [("`api/chat/routes.py`", 4, 12 + 4 + 1 + 10)]


def test_a_room_has_its_files_at_any_depth_and_its_scripts_apart(root: Path) -> None:
    rows = list(room_rows(root, read_modules(root)))
    assert rows[0] == ("`api`", 4, 21, 0, 0)
    assert rows[1:3] == [("`api/*.py`", 2, 5, 0, 0), ("`api/chat`", 2, 16, 0, 0)]
    assert ("`shared`", 2, 11, 1, 2) in rows
    assert rows[-1] == ("`api` + `worker` + `shared`", 7, 104, 1, 2)


def test_small_and_long_things_are_of_the_product_and_tests_are_counted_in_test_files(
    root: Path,
) -> None:
    rows = dict(shape_rows(root, read_modules(root)))
    assert rows == {
        "files that exactly one other imports": 4,
        "lines of the longest file": "72 (`worker/main.py`)",
        "lines of the longest function": "72 (`worker/main.py:1 main`)",
        "functions of more than 70 lines": 1,
        "test functions": 2,
    }


def test_the_last_run_of_the_tests_is_quoted(root: Path) -> None:
    (root / ".pytest_cache").mkdir()
    (root / ".pytest_cache/last-run").write_text("2 tests in 1 run, 1 min\n")
    rows = dict(shape_rows(root, read_modules(root)))
    assert rows["last run of the tests"] == "2 tests in 1 run, 1 min"


def test_it_prints_markdown_tables_of_another_checkout(root: Path) -> None:
    command = [sys.executable, "-m", "tools.stats", "--root", str(root)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert "| `api` | 4 | 21 | 0 | 0 |\n" in printed
    assert [line for line in printed.splitlines() if line and not line.startswith("|")] == []


PATHS = (
    ReadingPath("in", ("api.chat.routes",), until=("api.chat.reply",), max_files=2, max_lines=99),
    ReadingPath("out", ("api.chat.reply",), until=(), max_files=9, max_lines=3),
)
PATH_FILES = {
    "api/chat/routes.py": "import api.chat.reply\nimport shared.messages\n",
    "api/chat/reply.py": "import shared.messages\nimport shared.keys\n\n\n",
    "shared/messages.py": "\n",
    "shared/keys.py": "\n",
    "shared/grammar.py": "import shared.keys\n\n",
    "api/on_demand.py": 'PARTS = {"grammar": "shared.grammar"}\n',
}


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Module]:
    for name, text in PATH_FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(stats, "CHAT_PATHS", PATHS)
    return read_modules(tmp_path)


def test_a_reading_path_ends_where_the_other_begins(chat: dict[str, Module]) -> None:
    assert PATHS[0].modules(chat) == {"api.chat.routes", "shared.messages"}
    assert PATHS[1].modules(chat) == {"api.chat.reply", "shared.messages", "shared.keys"}


def test_a_part_on_demand_is_counted_with_what_it_adds_to_both_paths(
    chat: dict[str, Module],
) -> None:
    assert list(path_rows(chat)) == [
        ("in", 2, 3),
        ("out", 3, 6),
        ("all", 4, 8),
        ("on demand: `shared.grammar`", 1, 2),
    ]


def test_a_reading_path_over_its_limits_is_named_with_both(chat: dict[str, Module]) -> None:
    assert too_long(chat) == [
        "the reading path 'out' has 3 files and 6 lines; its limits are 9 and 3"
    ]


def test_the_table_of_a_page_has_lines_rounded_up_to_hundreds(chat: dict[str, Module]) -> None:
    assert "| all | 4 | 100 |\n" in path_table(chat)


def test_the_limits_hold_here() -> None:
    """`make lint` checks the same."""
    command = [sys.executable, "-m", "tools.stats", "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (ended.returncode, ended.stderr) == (0, "")
