"""Parses the bytes of a body into a request model; errors name the parameter at fault."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from api.errors import MAX_ECHO_CHARS
from api.generation.ignored_parameters import IgnoredMembers, without_unused
from api.generation.protocol import RequestModel
from api.on_demand import load_part
from api.request_errors import ClientError
from shared.messages import InvalidParameter

RequestT = TypeVar("RequestT", bound=RequestModel)

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
            raise load_part("validation_errors").invalid(error, members) from None
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
    load_part("validation_errors").shorten_objects(members)
    return model.model_validate(members)
