"""LineReader: the lines of a large file, a few at a time."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

BLOCK_BYTES = 256 * 1024


class Line(NamedTuple):
    """A line without its end. `data` is None for one that is too long to be read."""

    number: int  # the first is 1
    end_offset: int  # where the next one begins
    data: bytes | None

    @property
    def is_blank(self) -> bool:
        return self.data is not None and not self.data.strip()


class LineReader:
    """Lines of a file's first `num_bytes`, from the one with number `line` at `offset` on.

    Memory is bounded by `max_line_bytes` and what one call of `read` may return. Blocks: use it on
    a thread, by one task at a time. Raises OSError.
    """

    def __init__(
        self, path: Path, num_bytes: int, max_line_bytes: int, *, line: int = 1, offset: int = 0
    ) -> None:
        self._num_bytes = num_bytes
        self._max_line_bytes = max_line_bytes
        self._descriptor = os.open(path, os.O_RDONLY)
        self._hash = hashlib.sha256()
        self._number = line
        self._offset = offset  # of what is read next
        self._buffer = bytearray()
        self._start = 0  # of the first line in the buffer
        self._looked = 0  # up to here it has no line end
        self._is_too_long = False  # the line in the buffer has lost its beginning
        self.has_ended = False

    @property
    def sha256(self) -> str:
        """In hex, of all that was read so far."""
        return self._hash.hexdigest()

    def read(self, max_lines: int, max_bytes: int) -> list[Line]:
        """The next lines, at least one, and no more once they have `max_bytes`; [] at the end."""
        lines: list[Line] = []
        size = 0
        while len(lines) < max_lines and size < max_bytes and not self.has_ended:
            end = self._buffer.find(b"\n", self._looked)
            if end >= 0:
                lines.append(self._take(end, end + 1))
                size += len(lines[-1].data or b"")
                continue
            self._looked = len(self._buffer)
            if len(self._buffer) - self._start > self._max_line_bytes:
                self._is_too_long = True
                self._start = len(self._buffer)
            if not self._fill():
                self.has_ended = True
                if self._start < len(self._buffer) or self._is_too_long:
                    lines.append(self._take(len(self._buffer), len(self._buffer)))
        return lines

    def close(self) -> None:
        os.close(self._descriptor)

    def _fill(self) -> bool:
        del self._buffer[: self._start]
        self._looked -= self._start
        self._start = 0
        block = os.pread(
            self._descriptor, min(BLOCK_BYTES, self._num_bytes - self._offset), self._offset
        )
        self._hash.update(block)
        self._offset += len(block)
        self._buffer += block
        return bool(block)

    def _take(self, end: int, after: int) -> Line:
        size = end - self._start
        is_too_long = self._is_too_long or size > self._max_line_bytes
        data = None if is_too_long else bytes(self._buffer[self._start : end])
        line = Line(self._number, self._offset - len(self._buffer) + after, data)
        self._number += 1
        self._start = self._looked = after
        self._is_too_long = False
        return line
