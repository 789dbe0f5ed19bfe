"""From the bytes of a body to a typed request; every error names the member at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from api.errors import MAX_ECHO_CHARS, CallerError, unsupported
from api.generation.ignored_parameters import IgnoredMembers, without_unused
from api.generation.tools import NO_PARAMETERS
from shared.messages import InvalidParameter

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises CallerError (400) for anything that is not one."""
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise CallerError("The body is nested too deeply.", code="invalid_json") from None
    except (ValueError, OverflowError) as error:  # msgspec's and Unicode's errors are ValueErrors
        raise CallerError(
            f"The body is not valid JSON: {str(error)[:MAX_ECHO_CHARS]}.", code="invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise CallerError("The body must be a JSON object.", code="invalid_json")
    return body


def parse_request(
    body: Mapping[str, Any],
    kind: str,
    schema: type[RequestT],
    ignored: IgnoredMembers | None = None,
) -> RequestT:
    """A request of the given schema; `ignored` gets what of it is. Raises InvalidParameter."""
    known = frozenset(schema.__struct_fields__)
    members = without_unused(body, kind, known, ignored or IgnoredMembers())
    try:
        return msgspec.convert(members, schema)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _named(str(error)) from None
    except RecursionError:
        raise InvalidParameter("body", "is nested too deeply") from None


def _named(said: str) -> InvalidParameter:
    match = _PATH.match(said)
    assert match is not None
    what, path = match["what"], match["path"] or "$"
    if missing := _MISSING.match(what):
        name = _param(f"{path}.{missing[1]}")
        return InvalidParameter(
            name, f"Missing required parameter: '{name}'.", "missing_required_parameter"
        )
    if unknown := _UNKNOWN.match(what):
        return unsupported(_param(f"{path}.{unknown[1]}"), "it is not known here")
    plain = what.replace("`", "")
    return InvalidParameter(_param(path), plain[:1].lower() + plain[1:])


def _param(path: str) -> str:
    """`$.messages[0].role` -> `messages.0.role`; a key that msgspec hides is left out."""
    dotted = path.removeprefix("$").replace("[...]", "").replace("[", ".").replace("]", "")
    return dotted.strip(".")[:MAX_ECHO_CHARS] or "body"


# What the arguments of an enforced call may be: those that the function's parameters name.

# With one of these an object may have properties that are not in its `properties`.
_NAMING_OTHERS = (
    *("additionalProperties", "patternProperties", "minProperties"),
    *("allOf", "anyOf", "oneOf", "$ref"),
)


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema that the arguments of a call are kept to."""
    schema = {"type": "object", **parameters}
    if parameters is NO_PARAMETERS or _names_all(schema):
        schema["additionalProperties"] = False
    return schema


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema names some properties and says nothing of others. JSON schema would
    let others pass, but a function takes none: a call with one fails."""
    named = schema.get("properties")
    required = schema.get("required", [])
    return (
        isinstance(named, Mapping)
        and bool(named)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in named for name in required)
        and not any(keyword in schema for keyword in _NAMING_OTHERS)
    )
