"""The error of a request that is invalid: names the parameter at fault and the expected type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from api.errors import MAX_ECHO_CHARS
from api.generation.protocol import MAX_ENTRIES
from api.request_errors import missing_parameter, unknown_parameter
from shared.messages import InvalidParameter

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


def shorten_objects(body: dict[str, Any]) -> None:
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


def invalid(error: ValidationError, body: Mapping[str, Any]) -> InvalidParameter:
    """Returns the first fault; for a union, the fault that lies deepest in the value."""
    details = error.errors(include_url=False, include_input=False)
    # A missing parameter comes last: it may be missing because another name was used.
    first = next((detail for detail in details if detail["type"] != "missing"), details[0])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidParameter):  # raised by a validator of a request model
        return cause
    member = first["loc"][:1]
    found = [(_path(detail, body), detail) for detail in details if detail["loc"][:1] == member]
    depth = max(len(path) for path, _ in found)
    deepest = [(path, detail) for path, detail in found if len(path) == depth]
    deepest.sort(key=lambda fault: fault[1]["type"] == "missing")  # present ones come first
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
