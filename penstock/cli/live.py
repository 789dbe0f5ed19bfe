"""What changes at a terminal while a command runs: progress, and Markdown as it is streamed."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.cli.output import note
from shared.printable import printable

NOTE_S = 5.0
FENCES = ("```", "~~~")


class Counted:
    """Progress of `total` requests on stderr: a bar at a terminal, else a line each few seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._tokens = 0
        self._noted_s = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("requests, {task.fields[tokens]:,} tokens"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=total, tokens=0)

    def __enter__(self) -> Counted:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, num_tokens: int) -> None:
        """Counts a request that has ended, with its output."""
        self._done += 1
        self._tokens += num_tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, tokens=self._tokens)
        elif time.monotonic() - self._noted_s >= NOTE_S and self._done < self._total:
            self._noted_s = time.monotonic()
            note(f"{self._done} of {self._total} requests, {self._tokens} tokens.")


class StreamedMarkdown:
    """Renders Markdown at a terminal: the last block again with each piece, the others once."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._block = ""  # what may still change its look
        self._live: Live | None = None

    def add(self, text: str) -> None:
        """Shows a piece of the text."""
        self._block += printable(text)
        end = _end_of_blocks(self._block)
        if end:
            self._finish(self._block[:end])
            self._block = self._block[end:]
        if self._block.strip():
            if self._live is None:
                self._live = Live(
                    console=self._console, transient=True, vertical_overflow="ellipsis"
                )
                self._live.start()
            self._live.update(Markdown(self._block))

    def close(self) -> None:
        """Shows the rest as it stays."""
        self._finish(self._block)
        self._block = ""

    def _finish(self, blocks: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if blocks.strip():
            self._console.print(Markdown(blocks))
            self._console.print()


def _end_of_blocks(text: str) -> int:
    """Returns where the last finished block ends: at a blank line that is in no fence, and before
    a line that is no part of a list."""
    end, at, fence = 0, 0, ""
    lines = text.splitlines(keepends=True)
    for index, line in enumerate(lines):
        at += len(line)
        stripped = line.strip()
        if fence:
            fence = "" if stripped.startswith(fence) else fence
        elif stripped.startswith(FENCES):
            fence = stripped[:3]
        elif not stripped and line.endswith("\n") and index + 1 < len(lines):
            following = lines[index + 1]
            if following.strip() and not following.startswith((" ", "\t", "-", "*", "+")):
                is_numbered = following.lstrip()[:1].isdigit()
                end = end if is_numbered else at
    return end
