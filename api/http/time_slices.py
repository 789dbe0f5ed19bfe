"""TimeSlices: long work on the event loop, a few milliseconds at a time.

What takes long here is pure Python (an answer of many megabytes that is encoded, a long log that is
read): in a thread it would hold the interpreter's lock and take the loop's time as well
(docs/adr/0016). So it stays on the loop and gives way often.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated

from api.dependencies import provided

SLICE_S = 0.004
PIECE_BYTES = 65_536  # what a transport takes before its writer has to wait


class TimeSlices:
    """Shares the loop among all who have long work: one slice of one of them, then a turn of
    everything else that is ready. Those who wait are served in their order."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def pieces(self, parts: Iterable[bytes]) -> AsyncIterator[bytes]:
        """Yields `parts` joined to pieces of about PIECE_BYTES, or of what a slice gives."""
        rest = iter(parts)
        piece, is_over = _joined_for_a_slice(rest)  # most have no more: they take no turn
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
        """Takes everything from `steps`: each of them is work done."""
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
