"""What a caller is told when something is wrong: one class, one JSON shape, three trees.

    ApiError
    ├── CallerError      the request is at fault: 4xx
    ├── UnavailableError the world is at fault, later may be better: 429, 502, 503, 504
    └── ServerError      we are at fault: 500

Every answer that is an error, on every route, has the body
`{"error": {"message": str, "type": str, "param": str | null, "code": str | null}}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shared.messages import ErrorCode, Failed, InvalidParameter, JobState
from shared.transport.ports.jobs import Allowance, QueueFull, TransportError

RETRY_AFTER_OUTAGE_S = 2.0
MAX_ECHO_CHARS = 200  # of what the caller sent, when a message repeats it


class ApiError(Exception):
    """An error as the caller sees it.

    `should_retry` becomes the header `x-should-retry`, which overrides what the SDKs make of the
    status; `retry_after_s` becomes `retry-after`, in whole seconds, at least 1. `allowances`:
    what the answer's headers tell (api/jobs/rate_limit_headers.py).
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
        """The JSON object of the answer, and of an error event in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class CallerError(ApiError):
    """4xx: the same request will fail again."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        should_retry: bool | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(
            status,
            message,
            kind="invalid_request_error",
            code=code,
            param=param,
            should_retry=should_retry,
            headers=headers,
        )


class UnavailableError(ApiError):
    """The same request may succeed later."""


class ServerError(ApiError):
    """500: a mistake of ours."""

    def __init__(self, message: str, code: str = "internal_error") -> None:
        super().__init__(500, message, kind="server_error", code=code)


def internal_error() -> ServerError:
    """Returns the error of an exception that nothing handles; it is logged."""
    return ServerError("Internal server error.")


def invalid_parameter(error: InvalidParameter) -> CallerError:
    """400 that names the member at fault."""
    return CallerError(
        f"Invalid value for '{error.param}': {error.message}."
        if error.code is None
        else error.message,
        code=error.code,
        param=error.param,
    )


def unsupported(param: str, why: str) -> InvalidParameter:
    """A member that is understood or unknown, but not honoured: refused by name."""
    return InvalidParameter(
        param, f"Unsupported parameter: '{param}': {why}.", "unsupported_parameter"
    )


def unknown_parameter(param: str) -> InvalidParameter:
    """Returns the error of a parameter that does not exist."""
    param = param[:MAX_ECHO_CHARS]
    return InvalidParameter(param, f"Unknown parameter: '{param}'.", "unsupported_parameter")


def missing_parameter(param: str) -> InvalidParameter:
    """Returns the error of a required parameter that is absent."""
    return InvalidParameter(
        param, f"Missing required parameter: '{param}'.", "missing_required_parameter"
    )


@contextmanager
def renaming(table: Sequence[tuple[re.Pattern[str], str]]) -> Iterator[None]:
    """Errors name the members that the caller sent: the first pattern that a param begins with
    gives way to its name, which may refer to groups."""
    try:
        yield
    except InvalidParameter as error:
        for pattern, name in table:
            if found := pattern.match(error.param):
                renamed = found.expand(name) + error.param[found.end() :]
                message = error.message.replace(f"'{error.param}'", f"'{renamed}'")
                raise InvalidParameter(renamed, message, error.code) from None
        raise


def model_not_found(name: str) -> CallerError:
    return CallerError(
        f"The model '{name[:MAX_ECHO_CHARS]}' does not exist or is not served here.",
        status=404,
        code="model_not_found",
        param="model",
    )


def job_not_found(name: str) -> CallerError:
    return CallerError(
        f"No job '{name[:MAX_ECHO_CHARS]}': it never existed, or its record has expired.",
        status=404,
        code="job_not_found",
        param="id",
    )


def invalid_api_key(message: str) -> ApiError:
    """401: no key, one that is not known, or a token that is not good."""
    return ApiError(
        401,
        message,
        kind="authentication_error",
        code="invalid_api_key",
        should_retry=False,
        headers={"www-authenticate": 'Bearer realm="penstock"'},
    )


def key_disabled() -> ApiError:
    """403: the key is known, and lets nobody in."""
    return ApiError(
        403,
        "This API key has been disabled.",
        kind="permission_error",
        code="key_disabled",
        should_retry=False,
    )


def idempotency_key_reuse() -> CallerError:
    """400: not 409, which the SDKs send again."""
    return CallerError(
        "This idempotency key was used for another request: a key stands for one request.",
        code="idempotency_key_reuse",
        param="Idempotency-Key",
        should_retry=False,
    )


def letter_not_found(name: str) -> CallerError:
    return CallerError(
        f"No dead letter of a job '{name[:MAX_ECHO_CHARS]}': there was none, or it is gone.",
        status=404,
        code="dead_letter_not_found",
        param="id",
    )


def unavailable(message: str, retry_after_s: float = RETRY_AFTER_OUTAGE_S) -> UnavailableError:
    """503: Redis is away, no worker lives, or this frontend is going down."""
    return UnavailableError(
        503,
        message,
        kind="service_unavailable",
        code="service_unavailable",
        retry_after_s=retry_after_s,
    )


def going_down(message: str) -> UnavailableError:
    """503, or the last event of a stream: another frontend can go on."""
    return UnavailableError(
        503,
        message,
        kind="service_unavailable",
        code="frontend_draining",
        retry_after_s=1.0,
    )


def overloaded(
    message: str, retry_after_s: float, allowances: Sequence[Allowance] = ()
) -> UnavailableError:
    """503: this deployment has more work than it takes."""
    return UnavailableError(
        503,
        message,
        kind="overloaded_error",
        code="server_overloaded",
        retry_after_s=retry_after_s,
        allowances=allowances,
    )


def store_unreachable(error: TransportError) -> UnavailableError:
    """The caller learns that, not why: the reason is in our log."""
    del error
    return unavailable("The job store cannot be reached now. Try again soon.")


# scope of a QueueFull -> (code, message): limits of one tenant
_TENANT_LIMITS = {
    "tenant": (
        "tenant_queue_full",
        "Your share of the queue is full: too many of your requests are waiting.",
    ),
    "tenant_tokens": (
        "tenant_queue_full",
        "Your share of the queue is full: too many of your prompt tokens are waiting.",
    ),
    "tenant_jobs": ("concurrency_limit_exceeded", "Too many of your requests run at once."),
    "requests_per_minute": ("rate_limit_exceeded", "Too many requests in a minute."),
    "tokens_per_minute": ("rate_limit_exceeded", "Too many tokens in a minute."),
}


def queue_full(error: QueueFull) -> UnavailableError:
    """A tenant's own limit is 429, everybody's is 503."""
    if error.scope in _TENANT_LIMITS:
        code, message = _TENANT_LIMITS[error.scope]
        return UnavailableError(
            429,
            f"{message} Try again later.",
            kind="rate_limit_error",
            code=code,
            retry_after_s=error.retry_after_s,
            allowances=error.allowances,
        )
    why = "Too many requests are waiting."
    if error.scope == "deadline":
        why = "So many requests are waiting that this one would not be served before its deadline."
    if error.scope == "queue_timeout":
        why = (
            "So many requests are waiting that none would begin this one within its queue timeout."
        )
    return overloaded(f"{why} Try again later.", error.retry_after_s, error.allowances)


# code of a failed job -> (status, type, x-should-retry when nothing was delivered)
_JOB_ERRORS: dict[str, tuple[int, str, bool | None]] = {
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, "invalid_request_error", False),
    ErrorCode.KV_CAPACITY_EXCEEDED: (400, "invalid_request_error", False),
    ErrorCode.WORKER_LOST: (502, "server_error", True),
    ErrorCode.ENGINE_DIED: (502, "server_error", True),
    ErrorCode.PAYLOAD_LOST: (502, "server_error", True),
    ErrorCode.JOB_LOST: (503, "service_unavailable", True),
    ErrorCode.DEADLINE_EXCEEDED: (504, "timeout", False),
    ErrorCode.QUEUE_TIMEOUT: (504, "timeout", False),
    ErrorCode.CANCELLED: (409, "cancelled", False),
    ErrorCode.DISCONNECTED: (409, "cancelled", False),
    ErrorCode.ORPHANED: (409, "cancelled", False),
}


def job_failed(end: Failed, *, delivered: bool) -> ApiError:
    """The error of a job that did not end by itself.

    `delivered`: something of it has reached the caller, so that a retry would repeat it.
    """
    known = _JOB_ERRORS.get(end.code)
    if known is None and end.state is JobState.CANCELLED:
        known = _JOB_ERRORS[ErrorCode.CANCELLED]
    status, kind, should_retry = known or (500, "server_error", False)
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
