"""Reads and validates a batch's input file: its lines, the rows in them, and their errors.

CPU-bound and blocking: run it in a thread. Memory is bounded by the longest line that is allowed
and 20 bytes per row.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from api.errors import MAX_ECHO_CHARS
from api.generation.protocol import RequestModel
from api.generation.validation import parse_json, parse_request
from api.request_errors import ClientError, invalid_parameter
from shared.messages import InvalidParameter
from shared.transport.ports.batches import BatchError

MAX_CUSTOM_ID_CHARS = 512
_BOM = b"\xef\xbb\xbf"


class RowInvalid(Exception):
    """A line is not a valid row. `error` names the line."""

    def __init__(self, error: BatchError) -> None:
        super().__init__(error.message)
        self.error = error


class Line(NamedTuple):
    """A line of the input file, without its end."""

    number: int  # the first is 1
    offset: int  # of its first byte in the file
    end_offset: int  # of the next line
    data: bytes | None  # None where it is too long to be read

    @property
    def is_blank(self) -> bool:
        return self.data is not None and not self.data.strip()


class Row(NamedTuple):
    """One request of a batch: a line of its input file."""

    custom_id: str
    body: bytes  # a JSON object
    model: str | None  # where it names one


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _CheckedLine(RequestModel):
    """As _Line, for the slower parser that names the parameter at fault."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _Body(msgspec.Struct):
    model: Any = None


_lines = msgspec.json.Decoder(_Line)
_bodies = msgspec.json.Decoder(_Body)


def parse_row(line: Line, endpoint: str, max_bytes: int) -> Row:
    """Returns the row of a line. Raises RowInvalid.

    `max_bytes` of a line, for the message that refuses a longer one.
    """
    if line.data is None:
        message = f"The line has more than {max_bytes} bytes."
        raise RowInvalid(BatchError("line_too_long", message, None, line.number))
    data = line.data.removeprefix(_BOM) if line.number == 1 else line.data
    try:
        row = _lines.decode(data)
        body = bytes(row.body)
        model = _bodies.decode(body).model
    except (ValueError, RecursionError):
        raise RowInvalid(_error_of(data, line.number)) from None
    if not 0 < len(row.custom_id) <= MAX_CUSTOM_ID_CHARS:
        detail = f"must have 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise RowInvalid(_invalid("custom_id", detail, line.number))
    if row.method != "POST":
        raise RowInvalid(_invalid("method", "must be 'POST'", line.number, "invalid_method"))
    if row.url != endpoint:
        detail = f"must be the batch's endpoint, '{endpoint}'"
        raise RowInvalid(_invalid("url", detail, line.number, "mismatched_endpoint"))
    return Row(row.custom_id, body, model if isinstance(model, str) else None)


def _error_of(data: bytes, number: int) -> BatchError:
    try:
        parse_request(parse_json(data), _CheckedLine)
    except ClientError as error:
        message = error.message.replace("The body", "The line", 1)
        return BatchError("invalid_json_line", message, None, number)
    except InvalidParameter as error:
        refusal = invalid_parameter(error)
        code = error.code or f"invalid_{error.param.partition('.')[0]}"
        return BatchError(code[:MAX_ECHO_CHARS], refusal.message, error.param, number)
    return BatchError("invalid_json_line", "The line is not valid JSON.", None, number)


def _invalid(param: str, detail: str, number: int, code: str | None = None) -> BatchError:
    return BatchError(
        code or f"invalid_{param}", f"Invalid value for '{param}': {detail}.", param, number
    )


BLOCK_BYTES = 256 * 1024


class LineReader:
    """Reads the lines of a file's first `num_bytes`, from line `line` at `offset` on.

    Memory is bounded by `max_line_bytes` and by what one call of `read` may return. For one task at
    a time. Raises OSError.
    """

    def __init__(
        self, path: Path, num_bytes: int, max_line_bytes: int, *, line: int = 1, offset: int = 0
    ) -> None:
        self.has_ended = False
        self._num_bytes = num_bytes
        self._max_line_bytes = max_line_bytes
        self._hash = hashlib.sha256()
        self._number = line
        self._offset = offset  # of the next read
        self._file = path.open("rb", BLOCK_BYTES)
        self._file.seek(offset)

    @property
    def sha256(self) -> str:
        """The hex digest of everything read so far."""
        return self._hash.hexdigest()

    def read(self, max_lines: int, max_bytes: int) -> list[Line]:
        """Returns the next lines: at least one, and no more after `max_bytes`; [] at the end."""
        lines: list[Line] = []
        end = self._offset + max_bytes
        while len(lines) < max_lines and self._offset < end and not self.has_ended:
            line = self._read_line()
            if line is None:
                self.has_ended = True
            else:
                lines.append(line)
        return lines

    def close(self) -> None:
        self._file.close()

    def _read_line(self) -> Line | None:
        offset = self._offset
        block = data = self._read_block(self._max_line_bytes + 1)
        if not data:
            return None
        content = data.removesuffix(b"\n")
        is_too_long = len(content) > self._max_line_bytes
        while is_too_long and block and not block.endswith(b"\n"):
            block = self._read_block(BLOCK_BYTES)
        number, self._number = self._number, self._number + 1
        return Line(number, offset, self._offset, None if is_too_long else content)

    def _read_block(self, max_bytes: int) -> bytes:
        """Reads to the end of the line, or `max_bytes` of it."""
        block = self._file.readline(min(max_bytes, self._num_bytes - self._offset))
        self._hash.update(block)
        self._offset += len(block)
        return block


MAX_ERRORS = 100  # reading stops there
MAX_ERRORS_BYTES = 32 * 1024  # of these errors as JSON: they are kept as long as the batch


class InputCheck:
    """Finds every error of a batch's input that can be found before its first row runs.

    `feed` gets all lines once, in order; then `finish` compares repeated ids.
    """

    def __init__(self, endpoint: str, max_rows: int, max_line_bytes: int) -> None:
        self.num_rows = 0
        self.errors: list[BatchError] = []
        self._error_bytes = 0
        self._endpoint = endpoint
        self._max_rows = max_rows
        self._max_line_bytes = max_line_bytes
        self._ids = IdHashes()
        self._models: set[str | None] = set()

    @property
    def is_hopeless(self) -> bool:
        """Whether more lines would not change the outcome."""
        return (
            len(self.errors) >= MAX_ERRORS
            or self._error_bytes >= MAX_ERRORS_BYTES
            or self.num_rows > self._max_rows
        )

    @property
    def model(self) -> str | None:
        """The model that all rows name; None where they name several."""
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
                self._add(BatchError("too_many_rows", message, None, line.number))
                return
            try:
                row = parse_row(line, self._endpoint, self._max_line_bytes)
            except RowInvalid as invalid:
                self._add(invalid.error)
                continue
            self._ids.add(row.custom_id, line)
            if len(self._models) < 2:
                self._models.add(row.model)

    def finish(self, path: Path, num_bytes: int) -> None:
        """Adds the errors that need all lines: no rows, and ids that occur more than once.

        Rows whose ids have equal hashes are read again from the file's first `num_bytes` and
        compared. Raises OSError, and RowInvalid for a row that has changed since it was read.
        """
        if self.is_hopeless:
            return
        if not self.num_rows:
            self._add(BatchError("empty_file", "The file has no requests."))
            return
        suspects = self._ids.repeated(MAX_ERRORS)
        if not suspects:
            return
        first_lines: dict[str, int] = {}
        with path.open("rb") as file:
            for number, offset in suspects:
                if self.is_hopeless:
                    return
                file.seek(offset)
                data = file.readline(min(self._max_line_bytes + 1, num_bytes - offset))
                line = Line(number, offset, offset + len(data), data.removesuffix(b"\n"))
                row = parse_row(line, self._endpoint, self._max_line_bytes)
                first = first_lines.setdefault(row.custom_id, number)
                if first != number:
                    message = f"Duplicate custom_id: it was used in line {first}."
                    self._add(BatchError("duplicate_custom_id", message, "custom_id", number))

    def _add(self, error: BatchError) -> None:
        self.errors.append(error)
        self._error_bytes += len(msgspec.json.encode(error))


BUCKETS = 1024  # `repeated` makes a set of one at a time


class IdHashes:
    """Hashes of the ids of all rows, and where each row is: 20 bytes per row."""

    def __init__(self) -> None:
        self._seed = secrets.randbits(63)  # a client cannot compute ids that collide
        self._buckets = [(array("Q"), array("I"), array("Q")) for _ in range(BUCKETS)]

    def add(self, custom_id: str, line: Line) -> None:
        value = self.hash_of(custom_id)
        hashes, numbers, offsets = self._buckets[value % BUCKETS]
        hashes.append(value)
        numbers.append(line.number)
        offsets.append(line.offset)

    def hash_of(self, custom_id: str) -> int:
        return xxhash.xxh3_64_intdigest(custom_id.encode(errors="surrogatepass"), seed=self._seed)

    def repeated(self, limit: int) -> list[tuple[int, int]]:
        """Returns number and offset of the lines whose id has the hash of another, in order.

        At most `limit` hashes, and the first `limit` + 1 lines of each.
        """
        found: dict[int, list[tuple[int, int]]] = {}
        for hashes, numbers, offsets in self._buckets:
            if len(set(hashes)) == len(hashes):
                continue
            counts = Counter(hashes)
            for value, number, offset in zip(hashes, numbers, offsets, strict=True):
                if counts[value] > 1 and (value in found or len(found) < limit):
                    lines = found.setdefault(value, [])
                    if len(lines) <= limit:
                        lines.append((number, offset))
        return sorted(line for lines in found.values() for line in lines)
