"""Parses the bytes of a body into a request model; errors name the parameter at fault."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from api.errors import MAX_ECHO_CHARS, ClientError, missing_parameter, unknown_parameter
from api.generation.ignored_parameters import IgnoredMembers, without_unused
from api.generation.protocol import MAX_ENTRIES, RequestModel
from shared.messages import InvalidParameter

RequestT = TypeVar("RequestT", bound=RequestModel)

# type of pydantic's error -> the expected type
_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_SHOULD_BE = "Input should be "
_PADDING = b" " * 16  # longer than an escaped surrogate
MAX_FAULTS = 100  # of an error that is described; only unknown parameters can be more


def parse_json(raw: bytes) -> dict[str, Any]:
    """Returns the body as an object. Raises ClientError (400) for anything that is not one."""
    try:
        body = msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8))
    except RecursionError:
        raise ClientError("The body is nested too deeply.", code="invalid_json") from None
    except (ValueError, OverflowError) as error:  # msgspec's and Unicode's errors are ValueErrors
        reason = _lone_surrogate(raw) or str(error)[:MAX_ECHO_CHARS]
        raise ClientError(f"The body is not valid JSON: {reason}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ClientError("The body must be a JSON object.", code="invalid_json")
    return body


def _lone_surrogate(raw: bytes) -> str | None:
    """Returns the error of half a surrogate pair that is the last character of a text: the decoder
    looks for the other half after the end of the body, and calls the body truncated."""
    try:
        msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8) + _PADDING)
    except (ValueError, OverflowError, RecursionError) as error:
        return str(error) if "surrogate" in str(error) else None
    return None


def parse_request(
    body: Mapping[str, Any], model: type[RequestT], ignored: IgnoredMembers | None = None
) -> RequestT:
    """Returns the body as a request; `ignored` collects its parameters without effect.

    Raises InvalidParameter.
    """
    known = frozenset(model.model_fields)
    ignored = ignored or IgnoredMembers()
    try:
        members = without_unused(body, model.kind, known, ignored)
        try:
            request = _validate(members, model)
        except ValidationError as error:
            raise _invalid(error, members) from None
        ignored.leave_out(request.left_out())
        return request
    except InvalidParameter as error:
        raise model.explain(error) from None


def _validate(members: dict[str, Any], model: type[RequestT]) -> RequestT:
    """Raises ValidationError with a bounded number of faults."""
    try:
        return model.model_validate(members)
    except ValidationError as error:
        if error.error_count() <= MAX_FAULTS:
            raise
    _shorten_objects(members)
    return model.model_validate(members)


def _shorten_objects(body: dict[str, Any]) -> None:
    """Removes, in place, all but MAX_ENTRIES + 1 members of every object.

    Only unknown parameters can be very many faults, and pydantic describes them all at once. No
    model has as many fields.
    """
    values: list[Any] = [body]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            for name in list(value)[MAX_ENTRIES + 1 :]:
                del value[name]
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)


def _invalid(error: ValidationError, body: Mapping[str, Any]) -> InvalidParameter:
    """Returns the first fault; for a union, the fault that lies deepest in the value."""
    details = error.errors(include_url=False, include_input=False)
    # What is missing comes last: it may be missing because another name was used.
    first = next((detail for detail in details if detail["type"] != "missing"), details[0])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidParameter):  # raised by a validator of a request model
        return cause
    member = first["loc"][:1]
    found = [(_path(detail, body), detail) for detail in details if detail["loc"][:1] == member]
    depth = max(len(path) for path, _ in found)
    deepest = [(path, detail) for path, detail in found if len(path) == depth]
    deepest.sort(key=lambda fault: fault[1]["type"] == "missing")  # what is there comes first
    path, detail = deepest[0]
    param = ".".join(path)[:MAX_ECHO_CHARS] or "body"
    if detail["type"] in ("missing", "union_tag_not_found"):
        return missing_parameter(param)
    if detail["type"] == "extra_forbidden":
        return unknown_parameter(param)
    return InvalidParameter(param, _sentence([detail for at, detail in deepest if at == path]))


def _path(detail: ErrorDetails, body: Any) -> list[str]:
    """Returns the path of a fault in the body: pydantic's without the names of union members."""
    path: list[str] = []
    value, has_tag = body, False
    for index, part in enumerate(detail["loc"], start=1):
        is_last = index == len(detail["loc"])
        if not is_last and not has_tag and _is_tag(part, value, detail["loc"][index:], detail):
            has_tag = True
        elif isinstance(part, int) or (isinstance(value, Mapping) and part in value):
            value, has_tag = value[part], False
            path.append(str(part))
        elif is_last and detail["type"] == "missing":
            path.append(part)
    if detail["type"].startswith("union_tag"):
        path.append(str(detail["ctx"]["discriminator"]).strip("'"))
    return path


def _is_tag(part: int | str, value: Any, rest: Sequence[int | str], detail: ErrorDetails) -> bool:
    """Returns whether a part of a path names the member of a union that `value` is, and not one of
    its parameters: `function` may be both."""
    if not isinstance(value, Mapping) or part not in (value.get("type"), value.get("role")):
        return False
    inner = value.get(str(part))
    is_missing = detail["type"] == "missing" and len(rest) == 1
    is_parameter = isinstance(inner, Mapping) and (rest[0] in inner or is_missing)
    return not is_parameter or rest[0] == part


def _sentence(details: Sequence[ErrorDetails]) -> str:
    expected = [
        _EXPECTED.get(detail["type"]) or detail["msg"].removeprefix(_SHOULD_BE)
        for detail in details
        if detail["type"] in _EXPECTED or detail["msg"].startswith(_SHOULD_BE)
    ]
    if expected:
        return "must be " + " or ".join(dict.fromkeys(expected))
    if details[0]["type"] == "union_tag_invalid":
        return f"must be one of {details[0]['ctx']['expected_tags']}"
    message = details[0]["msg"]
    return message[:1].lower() + message[1:]
