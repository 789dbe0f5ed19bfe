"""What changes at a terminal while a command runs: progress, and Markdown as it is streamed."""

from __future__ import annotations

import math
import re
import sys
import time

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.markdown import Markdown, TableElement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segments
from rich.table import Table

from penstock.cli.output import note
from shared.printable import printable

NOTE_S = 5.0
# What opens a fence, as an item of a list too. After backticks no other one is on the line.
_FENCE = re.compile(r"\s*(?:[-*+]\s+|\d+[.)]\s+)?(`{3,}(?=[^`]*$)|~{3,})")
_ITEM = re.compile(r"[ \t*+-]|\d")  # a line that may belong to a list


class Counted:
    """Progress of `total` requests on stderr: a bar at a terminal, else a line each few seconds."""

    def __init__(self, total: int, *, has_bar: bool = True) -> None:
        self._total = total
        self._done = 0
        self._tokens = 0
        self._noted_s = time.monotonic()
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests, {task.fields[tokens]:,} tokens"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (has_bar and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task("", total=total, tokens=0)

    def __enter__(self) -> Counted:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:
            self._bar.stop()

    def add(self, num_tokens: int) -> None:
        """Counts a request that has ended, with its output."""
        self._done += 1
        self._tokens += num_tokens
        self._bar.update(self._task, completed=self._done, tokens=self._tokens)
        is_due = time.monotonic() - self._noted_s >= NOTE_S and self._done < self._total
        if self._bar.disable and is_due:
            self._noted_s = time.monotonic()
            note(f"{self._done} of {self._total} requests, {self._tokens} tokens.")


class _FoldedTable(TableElement):
    """A table whose cells are folded, not cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for made in super().__rich_console__(console, options):
            if isinstance(made, Table):
                for column in made.columns:
                    column.overflow = "fold"
            yield made


class _Markdown(Markdown):
    elements = Markdown.elements | {"table_open": _FoldedTable}


def _markdown(text: str) -> Markdown:
    """Renders Markdown so that nothing is lost: HTML, entities and images as they are written,
    links with their targets, table cells whole."""
    rendered = _Markdown("", hyperlinks=False)
    rendered.markup = text
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    rendered.parsed = parser.disable(["entity", "image", "reference", "autolink"]).parse(text)
    return rendered


class StreamedMarkdown:
    """Renders Markdown at a terminal: the end of the last block a few times a second, the others
    once."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live: Live | None = None
        self._begin()

    def _begin(self) -> None:
        self._block = ""  # what may still change its look
        self._scanned = 0  # characters of it, whole lines
        self._is_after_blank = False
        self._fence = ""  # the marks of an open one
        self._fenced = (0.0, 0.0, "")  # the last fence: where it starts and ends, its first line

    def add(self, text: str) -> None:
        """Shows a piece of the text."""
        self._block += printable(text)
        end = self._end_of_blocks()
        if end:
            self._finish(self._block[:end])
            start, stop, line = self._fenced
            self._block = self._block[end:]
            self._scanned -= end
            self._fenced = (start - end, stop - end, line)
        if self._live is None and self._block.strip():
            self._live = Live(console=self._console, transient=True, get_renderable=self._tail)
            self._live.start()

    def close(self) -> None:
        """Shows the rest as it stays."""
        self._finish(self._block)
        self._begin()

    def _finish(self, blocks: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if blocks.strip():
            self._console.print(_markdown(blocks))
            self._console.print()

    def _tail(self) -> Group:
        """Returns the end of the block, as many lines as the screen has."""
        block, (start, stop, line) = self._block, self._fenced
        width, height = self._console.size
        text = "".join(block[-width * height :].splitlines(keepends=True)[-height:])
        cut = len(block) - len(text)
        if start < cut < stop:
            text = f"{line}\n{text}"
        rendered = self._console.render_lines(_markdown(text), pad=False, new_lines=True)
        return Group(*(Segments(each) for each in rendered[1 - height :]))

    def _end_of_blocks(self) -> int:
        """Returns where the last finished block ends: at a blank line that is in no fence, and
        before a line that is no part of a list. It reads only new lines."""
        end = 0
        *lines, partial = self._block[self._scanned :].split("\n")
        for line in lines:
            if self._begins_block(line):
                end = self._scanned
            self._scan(line)
        return self._scanned if self._begins_block(partial) else end

    def _begins_block(self, line: str) -> bool:
        return self._is_after_blank and bool(line.strip()) and _ITEM.match(line) is None

    def _scan(self, line: str) -> None:
        stripped = line.strip()
        after = self._scanned + len(line) + 1
        if self._fence:
            if set(stripped) == {self._fence[0]} and len(stripped) >= len(self._fence):
                self._fenced = (self._fenced[0], after, self._fenced[2])
                self._fence = ""
        elif found := _FENCE.match(line):
            self._fence = found[1]
            self._fenced = (self._scanned, math.inf, line)
        self._is_after_blank = not stripped and not self._fence
        self._scanned = after
