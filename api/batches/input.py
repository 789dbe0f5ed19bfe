"""Rows: a line of a batch's input, taken apart, with a sentence for each thing that is wrong."""

from __future__ import annotations

import hashlib
import os
import secrets
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from api.errors import MAX_ECHO_CHARS, CallerError, invalid_parameter
from api.generation.validation import parse_json, parse_request
from shared.messages import InvalidParameter
from shared.transport.ports.batches import BatchError

MAX_CUSTOM_ID_CHARS = 512
_BOM = b"\xef\xbb\xbf"


class RowInvalid(Exception):
    """A line that is no request."""

    def __init__(self, error: BatchError) -> None:
        super().__init__(error.message)
        self.error = error


class Row(NamedTuple):
    """One request of a batch."""

    custom_id: str
    body: bytes  # a JSON object
    model: str | None  # where it names one


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _CheckedLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The same for the slow way, which names what is wrong."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _Body(msgspec.Struct):
    model: Any = None


_lines = msgspec.json.Decoder(_Line)
_bodies = msgspec.json.Decoder(_Body)


def parse_row(line: Line, endpoint: str, max_bytes: int) -> Row:
    """Raises RowInvalid. `max_bytes`: of a line, for the sentence that refuses a longer one."""
    if line.data is None:
        message = f"The line has more than {max_bytes} bytes."
        raise RowInvalid(BatchError("line_too_long", message, None, line.number))
    data = line.data.removeprefix(_BOM) if line.number == 1 else line.data
    try:
        row = _lines.decode(data)
        body = bytes(row.body)
        model = _bodies.decode(body).model
    except (ValueError, RecursionError):
        raise RowInvalid(_what_is_wrong(data, line.number)) from None
    if not 0 < len(row.custom_id) <= MAX_CUSTOM_ID_CHARS:
        said = f"must have 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise RowInvalid(_invalid("custom_id", said, line.number))
    if row.method != "POST":
        raise RowInvalid(_invalid("method", "must be 'POST'", line.number, "invalid_method"))
    if row.url != endpoint:
        said = f"must be the batch's endpoint, '{endpoint}'"
        raise RowInvalid(_invalid("url", said, line.number, "mismatched_endpoint"))
    return Row(row.custom_id, body, model if isinstance(model, str) else None)


def _what_is_wrong(data: bytes, number: int) -> BatchError:
    try:
        parse_request(parse_json(data), "batch_row", _CheckedLine)
    except CallerError as error:
        message = error.message.replace("The body", "The line", 1)
        return BatchError("invalid_json_line", message, None, number)
    except InvalidParameter as error:
        said = invalid_parameter(error)
        code = error.code or f"invalid_{error.param.partition('.')[0]}"
        return BatchError(code[:MAX_ECHO_CHARS], said.message, error.param, number)
    return BatchError("invalid_json_line", "The line is not valid JSON.", None, number)


def _invalid(param: str, said: str, number: int, code: str | None = None) -> BatchError:
    return BatchError(
        code or f"invalid_{param}", f"Invalid value for '{param}': {said}.", param, number
    )


# LineReader: the lines of a large file, a few at a time.

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


# InputCheck: everything about a batch's input that can be said before its first row runs.

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


# Duplicates: which of a million ids come twice, in eight bytes for each.
#
# The first pass keeps a hash of each id; ids whose hashes are equal are compared in a second pass,
# so that none is accused wrongly.

BUCKETS = 1024  # a set is made of one of them at a time


class IdHashes:
    """The first pass."""

    def __init__(self) -> None:
        self._seed = secrets.randbits(63)  # whoever writes the ids cannot make them collide
        self._buckets = [array("Q") for _ in range(BUCKETS)]

    def add(self, custom_id: str) -> None:
        value = self.hash_of(custom_id)
        self._buckets[value % BUCKETS].append(value)

    def hash_of(self, custom_id: str) -> int:
        return xxhash.xxh3_64_intdigest(custom_id.encode(errors="surrogatepass"), seed=self._seed)

    def repeated(self, limit: int) -> frozenset[int]:
        """At most `limit` of the hashes that came more than once."""
        found: set[int] = set()
        for bucket in self._buckets:
            seen: set[int] = set()
            if len(set(bucket)) == len(bucket):
                continue
            for value in bucket:
                if value in seen and len(found) < limit:
                    found.add(value)
                seen.add(value)
        return frozenset(found)


class Repetitions:
    """The second pass: of the ids with these hashes, the lines that repeat an earlier one."""

    def __init__(self, hashes: IdHashes, repeated: frozenset[int]) -> None:
        self._hashes = hashes
        self._repeated = repeated
        self._first: dict[str, int] = {}

    def first_line_of(self, custom_id: str, line: int) -> int | None:
        """The earlier line with this id; None when this is the first, or not one of these."""
        if self._hashes.hash_of(custom_id) not in self._repeated:
            return None
        first = self._first.setdefault(custom_id, line)
        return None if first == line else first
