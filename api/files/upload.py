"""Upload: streams the file of a multipart form to the disk.

At most FLUSH_BYTES of the file, and one read of the socket, are in memory. docs/adr/0035 compares
the form parsers of libraries.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from api.errors import MAX_ECHO_CHARS, going_down
from api.files.storage import BlobWriter
from api.generation.ignored_parameters import HEADER, IgnoredMembers
from api.http.caller import set_headers
from api.request_errors import ClientError, unknown_parameter
from shared.messages import InvalidParameter

FLUSH_BYTES = 1024 * 1024
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255
FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
MAX_SHOWN = 8  # names of fields in a response header
_SHOWN_FIELD = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
FORM_BYTES = 64 * 1024  # bytes of a form besides its file


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Bytes of the file, and seconds without any byte of it. `refuse_unused`: refuses fields that
    would be ignored."""

    max_bytes: int
    silence_s: float
    refuse_unused: bool = False


class _Form:
    """Collects the parts of a form. Raises ClientError and InvalidParameter."""

    def __init__(self, boundary: bytes, ignored: IgnoredMembers) -> None:
        self._ignored = ignored
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self.has_ended = False
        self._received: list[bytes] = []  # of the file, since the last `feed`
        self._header = b""
        self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field = ""
        self._data = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header,
                "on_header_value": self._on_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._name,
                "on_part_data": self._on_data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the bytes of the file that are in `data`."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _malformed(str(error)) from None
        received, self._received = self._received, []
        return received

    def _begin(self) -> None:
        self._headers.clear()
        self._data.clear()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _name(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._field = options.get(b"name", b"").decode(errors="replace")
        if self._field in self.fields or (self._field == "file" and self.file_name is not None):
            raise InvalidParameter(self._field, "is a duplicate")
        if self._field == "file":
            name = options.get(b"filename", b"file").decode(errors="replace")
            shown = "".join(char for char in name if char.isprintable())
            self.file_name = shown[:MAX_NAME_CHARS] or "file"
        elif self._field not in FIELDS:
            is_named = _SHOWN_FIELD.fullmatch(self._field) and len(self._ignored.names) < MAX_SHOWN
            shown = self._field if is_named else "form"
            self._ignored.report(shown, unknown_parameter(self._field or "form"))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self._received.append(data[start:end])
        elif self._field not in FIELDS:
            return
        elif len(self._data) + end - start > MAX_FIELD_BYTES:
            raise InvalidParameter(self._field, f"has more than {MAX_FIELD_BYTES} bytes")
        else:
            self._data += data[start:end]

    def _end(self) -> None:
        if self._field in FIELDS:
            self.fields[self._field] = self._data.decode(errors="replace")

    def _finish(self) -> None:
        self.has_ended = True


@dataclass(frozen=True, slots=True)
class Upload:
    """A received form, whose file is in the writer."""

    file_name: str
    fields: dict[str, str]  # those of FIELDS that were sent


async def receive_upload(
    request: Request, writer: BlobWriter, limits: UploadLimits, is_cut: Callable[[], bool]
) -> Upload:
    """Writes the file of a form to `writer`; returns its name and the other fields.

    The fields of other programs are named in a response header. Raises ClientError,
    InvalidParameter, OSError, ClientDisconnect, and UnavailableError once
    `is_cut` is true: this frontend is shutting down.
    """
    ignored = IgnoredMembers(refuse=limits.refuse_unused)
    form = _Form(_boundary_of(request), ignored)
    pieces: list[bytes] = []
    num_bytes = num_waiting = 0
    async for chunk in _chunks(request, limits.silence_s):
        if is_cut():
            raise going_down("This frontend is shutting down. Send the file again.")
        received = form.feed(chunk)
        size = sum(map(len, received))
        num_bytes += size
        num_waiting += size
        pieces += received
        if num_bytes > limits.max_bytes:
            raise too_large(limits.max_bytes)
        if num_waiting >= FLUSH_BYTES:
            await writer.append(pieces)
            pieces, num_waiting = [], 0
    if not form.has_ended:
        raise _malformed("its end is missing")
    if form.file_name is None:
        raise InvalidParameter(
            "file", "Missing required parameter: 'file'.", "missing_required_parameter"
        )
    await writer.append(pieces)
    if ignored.text is not None:
        set_headers(request.scope, {HEADER: ignored.text})
    return Upload(form.file_name, form.fields)


def too_large(max_bytes: int) -> ClientError:
    return ClientError(
        f"The file is larger than {max_bytes} bytes.",
        status=413,
        code="file_too_large",
        param="file",
    )


async def _chunks(request: Request, silence_s: float) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(silence_s):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise ClientError(
                f"No byte of the file was received for {silence_s:g} seconds.",
                status=408,
                code="body_timeout",
                should_retry=False,
            ) from None
        if chunk is None:
            return
        yield chunk


def _boundary_of(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        raise ClientError(
            "Files must be sent as multipart/form-data with a boundary.",
            code="invalid_multipart",
        )
    return boundary


def _malformed(detail: str) -> ClientError:
    return ClientError(
        f"The form is malformed: {detail[:MAX_ECHO_CHARS]}.", code="invalid_multipart"
    )
