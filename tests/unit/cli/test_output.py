"""What commands print at a terminal: tables that fit, Markdown as it is streamed, progress."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.markdown import Markdown

from penstock.cli import output
from penstock.cli.bench import PLOT_ROWS, _plot
from penstock.cli.live import Counted, StreamedMarkdown
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
    console.print(output.table_of(COLUMNS[:shown], [ROW[:shown]]))
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


TEXT = """# Dams

A *dam* holds `water`.

- one
- two

  still two

```python
a = 1

b = 2
```

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
    whole.print(Markdown(TEXT))
    texts = [console.file for console in (shown._console, whole)]
    found, expected = (
        [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
        for text in texts
        if isinstance(text, io.StringIO)
    )
    assert found == expected


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
