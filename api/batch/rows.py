"""Rows: a line of a batch's input, taken apart, with a sentence for each thing that is wrong."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from api.batch.lines import Line
from api.errors import MAX_ECHO_CHARS, CallerError, invalid_parameter
from api.openai.parse import parse_json, parse_request
from shared.messages import InvalidParameter
from shared.transport.batches import BatchError

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
