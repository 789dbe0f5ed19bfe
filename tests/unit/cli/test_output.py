"""What commands print at a terminal: tables that fit, Markdown as it is streamed, progress."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from penstock.cli import output
from penstock.cli.bench import PLOT_ROWS, _plot
from penstock.cli.chat import Conversation
from penstock.cli.live import Counted, StreamedMarkdown, _markdown
from penstock.cli.top import _view
from penstock.client import Delta
from tests.support.table import table

ID = "resp_0-01a21a2f-a3e9-74ea-b988-c4f2d473a1b2"
COLUMNS = ("id", "status", "model", "prompt", "created")
ROW = (ID, "finished", "penstock/demo", 1234, "2026-11-27 10:00:00")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@table("width", [20, 44, 60, 79, 80, 100, 131, 200])
def test_a_table_never_cuts_a_cell(width: int) -> None:
    shown = output._fitting(COLUMNS, [ROW], width)
    console = Console(width=max(width, len(ID)), file=io.StringIO())
    console.print(output._table_of(COLUMNS[:shown], [ROW[:shown]]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    for cell in ROW[: shown - 1] or ROW[:1]:
        assert str(cell) in text
    assert shown == len(COLUMNS) or width < len("".join(map(str, ROW))) + len(COLUMNS)


def test_columns_that_do_not_fit_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    output.print_table(COLUMNS, [ROW], "none")
    assert ID in screen.getvalue()
    assert "created" not in screen.getvalue()
    assert "not shown, for lack of space: model, prompt, created" in capsys.readouterr().err


def test_the_last_column_is_folded_where_a_dozen_cells_are_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the rows of `penstock doctor`."""
    sentence = "No valkey-server or redis-server was found: install one of them. " * 3
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    output.print_table(("", "check", "seen"), [("warning", "redis", sentence)], "none")
    assert " ".join(screen.getvalue().split()).endswith("install one of them.")
    assert capsys.readouterr().err == ""


def test_top_cuts_no_id_and_says_that_nothing_answers() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    job = {"id": ID, "model": "a/model-of-a-long-name", "usage": usage, "attempt": 1}
    health = {"status": "ok", "running": 1, "waiting": 0, "workers": []}
    seen = {"at": 0.0, "url": "http://x", "health": health, "running": [job]}
    screen = Console(width=60, file=io.StringIO())
    screen.print(_view(seen, seen, 60, "nothing answers at http://x"))
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert ID in shown
    assert "…" not in shown
    assert "model-of" not in shown, "it does not fit whole"
    assert shown.startswith("nothing answers at http://x\nLast seen ")


TEXT = """# Dams

A *dam* holds `water`.

- one
- two

  still two

```python
a = 1

b = 2
```

````markdown
```
inner
```

still code
````

```inline``` opens nothing.

The end."""


@table("size", [1, 3, 7, 1000])
def test_streamed_markdown_is_the_markdown_of_the_whole(
    size: int,
) -> None:
    shown = StreamedMarkdown()
    shown._console = Console(file=io.StringIO(), width=60, force_terminal=False)
    for at in range(0, len(TEXT), size):
        shown.add(TEXT[at : at + size])
    shown.close()
    whole = Console(file=io.StringIO(), width=60, force_terminal=False)
    whole.print(_markdown(TEXT))
    texts = [console.file for console in (shown._console, whole)]
    found, expected = (
        [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
        for text in texts
        if isinstance(text, io.StringIO)
    )
    assert found == expected


@table(
    "text",
    [
        "Give <name> and <b>bold</b>.",
        "<div>\na block of HTML\n</div>",
        "[here](https://example.org/a?b=1) and ![a dam](dam.png)",
        "[x]: https://example.org/reference",
        "&lt;script&gt; &#27;[31m",
        "<https://example.org>",
        f"| name | value |\n|---|---|\n| {'n' * 50} | {'v' * 70} |",
    ],
)
def test_markdown_loses_no_text(text: str) -> None:
    shown = Console(file=io.StringIO(), width=60, force_terminal=False)
    shown.print(_markdown(text))
    assert isinstance(shown.file, io.StringIO)
    found = shown.file.getvalue()
    assert "…" not in found
    assert "\x1b" not in found
    for mark in "<>&;/#nv":
        assert found.count(mark) >= text.count(mark), mark
    if not text.startswith("|"):
        for word in re.findall(r"[\w:/?=.&;#<>]+", text):
            assert word in found


def test_a_long_block_shows_its_last_screenful() -> None:
    shown = StreamedMarkdown()
    shown._console = Console(file=io.StringIO(), width=60, height=10, force_terminal=False)
    shown.add("```python\n" + "".join(f"line_{n} = {n}\n" for n in range(500)))
    screen = Console(file=io.StringIO(), width=60, height=10)
    screen.print(shown._tail())
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert len([line for line in lines if line.strip()]) >= 7
    assert len(lines) < 10
    assert "line_499 = 499" in screen.file.getvalue()
    assert "```" not in screen.file.getvalue()
    shown.close()


@table(
    "deltas",
    [
        [Delta(reasoning="why"), Delta(reasoning=" not")],
        [Delta(reasoning="why"), Delta(text="an *answer*")],
        [Delta(text="an *answer*"), Delta(reasoning="why"), Delta(text="the rest")],
    ],
)
def test_reasoning_stands_on_lines_of_its_own(
    deltas: list[Delta], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "80")

    class Answering:
        answer = Delta()

        def follow(self, _: str) -> Any:
            return self

        def __iter__(self) -> Iterator[Delta]:
            last = deltas[-1]
            return iter([*deltas[:-1], replace(last, event={"response": {}})])

    client: Any = Answering()
    Conversation(client, {}, as_json=False, shows_reasoning=True, renders=True)._follow("id")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert shown.endswith("\n")
    kinds = {"why": "reasoning", "answer": "text", "rest": "text"}
    for line in shown.splitlines():
        assert len({kind for word, kind in kinds.items() if word in line}) <= 1, shown


def test_progress_of_a_pipe_is_a_line_each_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr("penstock.cli.live.time.monotonic", lambda: now_s)
    with Counted(10) as progress:
        for _ in range(10):
            progress.add(7)
            now_s += 2.0
    noted = re.findall(r"(\d+) of 10 requests, (\d+) tokens", capsys.readouterr().err)
    assert noted == [("4", "28"), ("7", "49")]


def test_the_plot_has_each_request_once() -> None:
    seconds = [0.1 + n / 100 for n in range(37)] + [0.9]
    lines = _plot("time", seconds).splitlines()
    assert len(lines) == 1 + PLOT_ROWS
    assert sum(int(found[1]) for line in lines[1:] if (found := re.search(r" (\d+)$", line))) == 38
    assert _plot("time", [0.5, 0.5]).splitlines()[1].endswith(" 2")
