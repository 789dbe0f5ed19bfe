"""TimeSlices: long work on the event loop, a few milliseconds at a time.

The work is pure Python: encoding a response of many megabytes, reading a long log. A thread would
hold the interpreter's lock and delay other streams as much: slices and a thread measured alike. On
the loop a response belongs to one thread, and a disconnect cancels its work at the next slice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated

from api.dependencies import provided

SLICE_S = 0.004
PIECE_BYTES = 65_536  # a transport accepts them before its writer has to wait


class TimeSlices:
    """Shares the loop among long tasks: one slice of one of them, then everything that is ready.

    The long tasks take turns in the order in which they wait.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def pieces(self, parts: Iterable[bytes]) -> AsyncIterator[bytes]:
        """Yields `parts` joined to pieces of about PIECE_BYTES, or of one slice."""
        rest = iter(parts)
        piece, is_over = _joined_for_a_slice(rest)  # mostly everything: that takes no turn
        yield piece
        while not is_over:
            async with self._turn:
                piece, is_over = _joined_for_a_slice(rest)
                await asyncio.sleep(0)
            yield piece

    async def joined(self, parts: Iterable[bytes]) -> bytes:
        """Returns all of `parts` as one."""
        return b"".join([piece async for piece in self.pieces(parts)])

    async def run(self, steps: Iterable[object]) -> None:
        """Exhausts `steps`, an iterable that does the work as it is iterated."""
        rest = iter(steps)
        is_over = _took_for_a_slice(rest)
        while not is_over:
            async with self._turn:
                is_over = _took_for_a_slice(rest)
                await asyncio.sleep(0)


def _joined_for_a_slice(rest: Iterator[bytes]) -> tuple[bytes, bool]:
    """Returns a piece, and whether nothing is left."""
    ends_s = time.perf_counter() + SLICE_S
    parts, num_bytes = [], 0
    for part in rest:
        parts.append(part)
        num_bytes += len(part)
        if num_bytes >= PIECE_BYTES or time.perf_counter() >= ends_s:
            return b"".join(parts), False
    return b"".join(parts), True


def _took_for_a_slice(rest: Iterator[object]) -> bool:
    """Returns whether nothing is left."""
    ends_s = time.perf_counter() + SLICE_S
    return all(time.perf_counter() < ends_s for _ in rest)


SlicesDep = Annotated[TimeSlices, provided(TimeSlices)]
