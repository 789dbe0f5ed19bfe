"""Errors as the Messages dialect says them, from those of the rest of the house."""

from __future__ import annotations

from typing import Any

OVERLOADED_STATUS = 529  # of this dialect; everywhere else the same is 503

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def error_status(status: int) -> int:
    """The HTTP status that this dialect has for one of ours."""
    return OVERLOADED_STATUS if status == 503 else status


def error_payload(
    status: int, message: str, code: str | None, param: str | None, request_id: str
) -> dict[str, Any]:
    """The body of an error answer, or of an `error` event; `status` is ours.

    `details` has, as far as there are any, the code that the other dialects have and the member
    that is at fault.
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    details = {"error_code": code, "param": param}
    if any(details.values()):
        error["details"] = {name: value for name, value in details.items() if value is not None}
    return {"type": "error", "error": error, "request_id": request_id}
