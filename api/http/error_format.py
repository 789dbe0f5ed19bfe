"""The body and status of an error response, in the shape of the route's dialect.

Anthropic's routes have Anthropic's shape and its status for an overload; all others have OpenAI's:
`{"error": {"message": str, "type": str, "param": str | null, "code": str | null}}`.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from api.errors import ApiError
from api.http.caller import caller_in, speaks_anthropic
from api.http.sse import json_bytes

OVERLOADED_STATUS = 529  # Anthropic's; everywhere else it is 503
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


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns the response to the request of `scope`."""
    status, body = error.status, error.body()
    if speaks_anthropic(scope):
        status, body = anthropic_status(status), anthropic_body(error, caller_in(scope).request_id)
    return Response(
        json_bytes(body), status_code=status, headers=error.headers, media_type="application/json"
    )


def anthropic_status(status: int) -> int:
    """Returns Anthropic's status for one of OpenAI's."""
    return OVERLOADED_STATUS if status == 503 else status


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the body of an error response, or of an `error` event.

    `details` has the code of the other dialects and the parameter at fault, if there are any.
    """
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    described: dict[str, Any] = {"type": kind, "message": error.message}
    details = {"error_code": error.code, "param": error.param}
    if any(details.values()):
        described["details"] = {name: value for name, value in details.items() if value is not None}
    return {"type": "error", "error": described, "request_id": request_id}
