"""InputCheck: everything about a batch's input that can be said before its first row runs."""

from __future__ import annotations

from collections.abc import Sequence

from api.batch.duplicates import IdHashes, Repetitions
from api.batch.lines import Line
from api.batch.rows import RowInvalid, parse_row
from shared.transport.batches import BatchError

MAX_ERRORS = 100  # then nothing more is read


class InputCheck:
    """Fed with all lines once, and once more when `needs_second_pass`. Takes its time: use it on a
    thread."""

    def __init__(self, endpoint: str, max_rows: int, max_line_bytes: int) -> None:
        self.num_rows = 0
        self.errors: list[BatchError] = []
        self._endpoint = endpoint
        self._max_rows = max_rows
        self._max_line_bytes = max_line_bytes
        self._ids = IdHashes()
        self._models: set[str | None] = set()
        self._repetitions: Repetitions | None = None

    @property
    def is_hopeless(self) -> bool:
        return len(self.errors) >= MAX_ERRORS or self.num_rows > self._max_rows

    @property
    def model(self) -> str | None:
        """The one that all rows name, if it is one."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def feed(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if self.is_hopeless:
                return
            if line.is_blank:
                continue
            self.num_rows += 1
            if self.num_rows > self._max_rows:
                message = f"The file has more than {self._max_rows} requests."
                self.errors.append(BatchError("too_many_rows", message, None, line.number))
                return
            try:
                row = parse_row(line, self._endpoint, self._max_line_bytes)
            except RowInvalid as invalid:
                self.errors.append(invalid.error)
                continue
            self._ids.add(row.custom_id)
            if len(self._models) < 2:
                self._models.add(row.model)

    def needs_second_pass(self) -> bool:
        """Call it when all lines were fed."""
        if self.is_hopeless:
            return False
        if not self.num_rows:
            self.errors.append(BatchError("empty_file", "The file has no requests."))
            return False
        repeated = self._ids.repeated(MAX_ERRORS)
        self._repetitions = Repetitions(self._ids, repeated) if repeated else None
        return self._repetitions is not None

    def feed_again(self, lines: Sequence[Line]) -> None:
        assert self._repetitions is not None, "there is no second pass"
        for line in lines:
            if self.is_hopeless:
                return
            if line.is_blank:
                continue
            try:
                row = parse_row(line, self._endpoint, self._max_line_bytes)
            except RowInvalid:
                continue  # said in the first pass
            first = self._repetitions.first_line_of(row.custom_id, line.number)
            if first is not None:
                message = f"The custom_id was used before, in line {first}."
                self.errors.append(
                    BatchError("duplicate_custom_id", message, "custom_id", line.number)
                )
