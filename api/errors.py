"""The errors of the API: one class with one JSON shape.

    ApiError
    ├── ClientError      client error: 4xx (api.request_errors)
    ├── UnavailableError unavailable, a later request may succeed: 429, 502, 503, 504
    └── ServerError      server error: 500

Every error response, on every route, has the body
`{"error": {"message": str, "type": str, "param": str | null, "code": str | null}}`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from shared.messages import ErrorCode, Failed, JobState
from shared.transport.ports.jobs import Allowance, TransportError

RETRY_AFTER_OUTAGE_S = 2.0
MAX_ECHO_CHARS = 200  # of a client's value that a message repeats


class ApiError(Exception):
    """An error as the client receives it.

    `should_retry` becomes the header `x-should-retry`, which overrides what the SDKs make of the
    status; `retry_after_s` becomes `retry-after`, in whole seconds, at least 1. `allowances` become
    the rate limit headers (api/http/response_headers.py).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        headers: dict[str, str] | None = None,
        allowances: Sequence[Allowance] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.allowances = allowances
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        if should_retry is not None:
            self.headers["x-should-retry"] = "true" if should_retry else "false"

    def body(self) -> dict[str, Any]:
        """Returns the JSON object of the response, and of an error event in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class UnavailableError(ApiError):
    """The same request may succeed later."""


class ServerError(ApiError):
    """500."""

    def __init__(self, message: str, code: str = "internal_error") -> None:
        super().__init__(500, message, kind="server_error", code=code)


def internal_error() -> ServerError:
    """Returns the error of an exception that nothing handles; it is logged."""
    return ServerError("Internal server error.")


class _Kind(NamedTuple):
    status: int
    type: str
    should_retry: bool | None = None


_INVALID = "invalid_request_error"
# A failed job; `should_retry` applies if nothing of it has been delivered.
_JOB_KINDS: dict[str, _Kind] = {
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: _Kind(400, _INVALID, False),
    ErrorCode.KV_CAPACITY_EXCEEDED: _Kind(400, _INVALID, False),
    ErrorCode.WORKER_LOST: _Kind(502, "server_error", True),
    ErrorCode.ENGINE_DIED: _Kind(502, "server_error", True),
    ErrorCode.PAYLOAD_LOST: _Kind(502, "server_error", True),
    ErrorCode.JOB_LOST: _Kind(503, "service_unavailable", True),
    ErrorCode.JOB_EXPIRED: _Kind(410, _INVALID, False),
    ErrorCode.MODEL_REPLACED: _Kind(503, "service_unavailable", True),
    ErrorCode.DEADLINE_EXCEEDED: _Kind(504, "timeout", False),
    ErrorCode.QUEUE_TIMEOUT: _Kind(504, "timeout", False),
    ErrorCode.CANCELLED: _Kind(409, "cancelled", False),
    ErrorCode.DISCONNECTED: _Kind(409, "cancelled", False),
    ErrorCode.ORPHANED: _Kind(409, "cancelled", False),
}


def unavailable(
    message: str,
    retry_after_s: float = RETRY_AFTER_OUTAGE_S,
    code: str = "service_unavailable",
) -> UnavailableError:
    """Returns the error of an unreachable Redis, of no live worker, or of a shutdown."""
    kind = "service_unavailable"
    return UnavailableError(503, message, kind=kind, code=code, retry_after_s=retry_after_s)


def going_down(message: str) -> UnavailableError:
    """Returns the error, or the last event of a stream, that another frontend can continue."""
    return unavailable(message, 1.0, "frontend_draining")


def overloaded(
    message: str,
    retry_after_s: float,
    allowances: Sequence[Allowance] = (),
    code: str = "server_overloaded",
) -> UnavailableError:
    """Returns the error of a deployment that is at capacity."""
    return UnavailableError(
        503,
        message,
        kind="overloaded_error",
        code=code,
        retry_after_s=retry_after_s,
        allowances=allowances,
    )


def share_exceeded(what: str, retry_after_s: float) -> UnavailableError:
    """Returns the error of a tenant that has its share of something of this frontend; `what`: its
    name in the plural."""
    return UnavailableError(
        429,
        f"Your share of this server's {what} is used up. Wait until some of your requests have "
        "ended, or send fewer at once.",
        kind="rate_limit_error",
        code="tenant_share_exceeded",
        retry_after_s=retry_after_s,
    )


def is_refusal(error: ApiError) -> bool:
    """Returns whether the error is of a limit: of a tenant, or of the deployment."""
    return error.status == 429 or error.code in ("server_overloaded", "store_full")


def store_unreachable(error: TransportError) -> UnavailableError:
    """Returns an error that does not name the reason, which is in the log."""
    del error
    return unavailable("The job store is unavailable. Try again soon.")


def job_failed(end: Failed, *, delivered: bool) -> ApiError:
    """Returns the error of a job that did not finish.

    `delivered`: a part of its response has reached the client, so that a retry would repeat it.
    """
    known = _JOB_KINDS.get(end.code)
    if known is None and end.state is JobState.CANCELLED:
        known = _JOB_KINDS[ErrorCode.CANCELLED]
    status, kind, should_retry = known or _Kind(500, "server_error", False)
    code = end.code
    if code == ErrorCode.DEADLINE_EXCEEDED and not end.usage.completion_tokens:
        code = ErrorCode.QUEUE_TIMEOUT  # its time ran out before its first token
    return ApiError(
        status,
        end.message or f"The job ended as {end.state.value}: {end.code}.",
        kind=kind,
        code=code,
        should_retry=False if delivered else should_retry,
    )
