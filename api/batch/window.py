"""LineWindow: which lines of a batch are done, as few numbers as that takes."""

from __future__ import annotations

from shared.transport.batches import BatchProgress

SPAN_LINES = 4096  # from the first line that is not done to the last that was begun


class _Begun:
    __slots__ = ("end_offset", "is_done")

    def __init__(self, end_offset: int, is_done: bool) -> None:
        self.end_offset = end_offset
        self.is_done = is_done


class LineWindow:
    """Lines begin in order and end in any. Everything before `low_line` is done."""

    def __init__(self, progress: BatchProgress) -> None:
        self.low_line = progress.low_line
        self.low_offset = progress.low_offset
        self._known_from = progress.low_line
        self._known_bits = progress.done_bits
        self._begun: dict[int, _Begun] = {}  # in order

    @property
    def is_full(self) -> bool:
        """No line may begin before the oldest is done."""
        return len(self._begun) >= SPAN_LINES

    def begin(self, line: int, end_offset: int) -> bool:
        """The next line in order. False: it is done already."""
        assert line == self.low_line + len(self._begun), "lines begin in order"
        is_done = bool(self._known_bits >> (line - self._known_from) & 1)
        self._begun[line] = _Begun(end_offset, is_done)
        if is_done:
            self._advance()
        return not is_done

    def finish(self, line: int) -> None:
        self._begun[line].is_done = True
        self._advance()

    @property
    def done_bits(self) -> int:
        """As BatchProgress. Lines that an earlier owner finished count before they begin here."""
        bits = self._known_bits >> (self.low_line - self._known_from)
        for place, begun in enumerate(self._begun.values()):
            if begun.is_done:
                bits |= 1 << place
        return bits

    def _advance(self) -> None:
        while self._begun:
            begun = next(iter(self._begun.values()))
            if not begun.is_done:
                return
            self._begun.pop(self.low_line)
            self.low_line += 1
            self.low_offset = begun.end_offset
