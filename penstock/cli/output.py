"""What commands print: for people tables and sentences, with `--json` one object a line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.printable import printable, printable_line

GAP = 1  # between columns
MIN_FOLDED = 12
STATUS_STYLES = {
    "ok": "green",
    "finished": "green",
    "running": "cyan",
    "queued": "yellow",
    "resuming": "yellow",
    "draining": "yellow",
    "warning": "yellow",
    "degraded": "yellow",
    "no_workers": "yellow",
    "error": "red",
    "failed": "red",
    "stalled": "red",
    "expired": "red",
}


def print_json(value: object) -> None:
    """Prints one object as one line, controls as JSON escapes."""
    sys.stdout.write(printable(json.dumps(value, ensure_ascii=False)) + "\n")
    sys.stdout.flush()


def note(sentence: str) -> None:
    """Prints a sentence that is no result, on stderr."""
    sys.stderr.write(f"penstock: {printable(sentence)}\n")
    sys.stderr.flush()


def print_text(text: str) -> None:
    """Prints a piece of a streamed text, at once; into a pipe as it is."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_dimmed(text: str) -> None:
    """Prints a piece of a text as `print_text`, at a terminal dimmed."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\x1b[2m{printable(text)}\x1b[22m")
        sys.stdout.flush()
    else:
        print_text(text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
    """Prints rows under their columns; the sentence `empty` without rows. Into a pipe the
    cells are whole."""
    if not rows:
        note(empty)
        return
    console = _console()
    table, left_out = fitted_table(columns, rows, console.width)
    console.print(table)
    if left_out:
        note(f"not shown, for lack of space: {', '.join(left_out)}. --json has everything.")


def fitted_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], width: int
) -> tuple[Table, Sequence[str]]:
    """Returns a table of the columns that fit whole, and those that do not."""
    shown = _fitting(columns, rows, width)
    return _table_of(columns[:shown], [row[:shown] for row in rows]), columns[shown:]


def _table_of(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Returns rows under their columns. The last column is folded where it is too wide."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns, 1):
        table.add_column(column, no_wrap=index < len(columns), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    return table


def _fitting(columns: Sequence[str], rows: Sequence[Sequence[object]], width: int) -> int:
    """Returns how many columns, from the left, fit whole: an id that is cut is another id."""
    used = 0
    for index, column in enumerate(columns):
        cells = (cell_len(_cell(row[index]).plain) for row in rows)
        last = max([cell_len(column), *cells])
        used += last + (GAP if index else 0)
        # The last one may be folded, to MIN_FOLDED at least.
        over = used - width
        is_foldable = index == len(columns) - 1 and last - over >= min(MIN_FOLDED, last)
        if over > 0 and not is_foldable:
            return max(1, index)
    return len(columns)


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Prints names with their values, without those that are None."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        if value is not None:
            table.add_row(Text(printable_line(name)), _cell(value))
    _console().print(table)


def clock_time(unix_s: float | None) -> str | None:
    """Returns a local date and time; None for None."""
    if unix_s is None:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def milliseconds(value: float | None) -> str | None:
    """Returns a duration with its unit; None for None."""
    if value is None:
        return None
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


_CAUSES = {
    "worker_lost": "Worker lost",
    "released": "Worker stopped",
    "preempted": "Preempted by a higher lane",
    "engine_died": "Engine lost",
    "engine_stalled": "Engine stalled",
    "device_lost": "Device lost",
    "upstream_lost": "No upstream answers",
}


def loss_words(cause: str | None, tokens: int) -> str:
    """Returns how an attempt ended that did not end its job, which then has `tokens`."""
    place = f"after token {tokens}" if tokens else "before the first token"
    return f"{_CAUSES.get(cause or '', 'Worker lost')} {place}"


def waiting_words(recovery: Mapping[str, Any]) -> str:
    """Returns the sentence of a job that has lost its worker: its `recovery`, or such an event."""
    return f"{loss_words(recovery['cause'], recovery['tokens'])}, resuming"


def resumed_words(job: Mapping[str, Any]) -> str | None:
    """Returns the sentence of a job's latest resume by another worker; None without one."""
    if len(job["attempts"]) < 2:
        return None
    before, after = job["attempts"][-2:]
    gap_s = after["started_at"] - (before.get("ended_at") or after["started_at"])
    loss = loss_words(before.get("cause"), after["completion_tokens"])
    return f"{loss}; {_resumed(after['worker'], gap_s)}"


def _resumed(worker: str, gap_s: float | None) -> str:
    after = "" if gap_s is None else f" after {max(0.0, gap_s):.1f} s"
    return f"resumed on worker {worker}{after}, nothing lost"


def note_recovery(event: Mapping[str, Any]) -> None:
    """Notes an event of the type `recovery`, between two pieces of a text."""
    if sys.stdout.isatty():
        print_text("\n")  # the text stands there
    if event["state"] == "waiting":
        note(f"{waiting_words(event)}.")
    else:
        note(f"{_resumed(event['worker'], event['after_s'])}.")


def _console() -> Console:
    is_terminal = sys.stdout.isatty()
    return Console(width=None if is_terminal else 1000, highlight=False, soft_wrap=not is_terminal)


def _cell(value: Any) -> Text:
    text = "-" if value is None else printable_line(str(value))
    return Text(text, style=STATUS_STYLES.get(text, ""))
